# ruff: noqa
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class SmallCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.AvgPool2d(2)
        )
        self.fc = nn.Linear(8 * 16, 10)

    def forward(self, x):
        return self.fc(self.conv(x).flatten(1))


def train_one_epoch(model, loader, opt, accum, total_samples):
    model.train()
    n_batches = len(loader)
    bs = loader.batch_size
    seen_loss = 0.0
    for i, (x, y) in enumerate(loader):
        start = (i // accum) * accum
        # samples in this window, the last one may be short and its last batch smaller
        window = min((start + accum) * bs, total_samples) - start * bs
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        (loss / window).backward()
        seen_loss += loss.item()
        if (i + 1) % accum == 0 or i + 1 == n_batches:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
    return seen_loss / total_samples


if __name__ == "__main__":
    torch.manual_seed(32)
    ds = TensorDataset(torch.randn(41, 1, 8, 8), torch.randint(0, 10, (41,)))
    model = SmallCNN()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dl = DataLoader(ds, batch_size=4, shuffle=True)
    for epoch in range(2):
        print(f"epoch {epoch} loss {train_one_epoch(model, dl, opt, 4, len(ds)):.4f}")
