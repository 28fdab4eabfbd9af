# ruff: noqa
import torch
import torch.nn.functional as F
from torch import nn


class TwoTower(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, dim))
        self.text = nn.Sequential(nn.Embedding(40, 32), nn.Flatten(), nn.Linear(32 * 5, dim))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, img, txt):
        a = F.normalize(self.image(img), dim=-1)
        b = F.normalize(self.text(txt), dim=-1)
        return a, b


def clip_loss(a, b, scale):
    logits = scale.exp() * a @ b.T
    target = torch.arange(len(a))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def train(epochs=2, batch_size=16, micro=4):
    torch.manual_seed(9)
    images, texts = torch.randn(64, 20), torch.randint(0, 40, (64, 5))
    model = TwoTower()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for rows in torch.randperm(64).split(batch_size):
            opt.zero_grad()
            running = 0.0
            for r in rows.split(micro):
                a, b = model(images[r], texts[r])
                loss = clip_loss(a, b, model.logit_scale)
                (loss * len(r) / len(rows)).backward()
                running += loss.item() * len(r) / len(rows)
            opt.step()
        print(epoch, f"{running:.4f}")


if __name__ == "__main__":
    train()
