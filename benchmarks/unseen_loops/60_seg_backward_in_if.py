# ruff: noqa
import torch
import torch.nn as nn


def dice_loss(logits, target, eps=1.0):
    p = logits.sigmoid().flatten(1)
    t = target.flatten(1)
    return (1 - (2 * (p * t).sum(1) + eps) / (p.sum(1) + t.sum(1) + eps)).mean()


class UNetSmall(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.mid = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.out = nn.Conv2d(5, 1, 1)

    def forward(self, x):
        h = self.mid(self.down(x).relu()).relu()
        return self.out(torch.cat([self.up(h), x], 1))


def train_fn(loader, model, optimizer, loss_fn, accumulation_steps):
    for batch_idx, (data, targets) in enumerate(loader):
        predictions = model(data)
        loss = loss_fn(predictions, targets) + dice_loss(predictions, targets)
        loss = loss / accumulation_steps
        if (batch_idx + 1) % accumulation_steps == 0:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return loss.item() * accumulation_steps


def main():
    torch.manual_seed(14)
    loader = [
        (torch.randn(2, 1, 16, 16), (torch.rand(2, 1, 16, 16) > 0.7).float()) for _ in range(8)
    ]
    model = UNetSmall()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        print(epoch, train_fn(loader, model, optimizer, nn.BCEWithLogitsLoss(), 4))


if __name__ == "__main__":
    main()
