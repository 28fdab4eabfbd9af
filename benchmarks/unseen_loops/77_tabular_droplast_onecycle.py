# ruff: noqa
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(epochs=3, accum=4, bs=5):
    torch.manual_seed(47)
    X = torch.randn(103, 7)
    y = (X[:, :2].sum(1) > 0).float()
    loader = DataLoader(
        TensorDataset(X, y), batch_size=bs, shuffle=True, drop_last=True
    )  # 20 batches
    updates_per_epoch = len(loader) // accum
    model = nn.Sequential(nn.Linear(7, 20), nn.SELU(), nn.Linear(20, 1))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    sched = torch.optim.lr_scheduler.OneCycleLR(
        opt, max_lr=2e-2, total_steps=epochs * updates_per_epoch
    )
    lossf = nn.BCEWithLogitsLoss()
    best = float("inf")
    for ep in range(epochs):
        model.train()
        s = 0.0
        for j, (a, b) in enumerate(loader, 1):
            l = lossf(model(a).squeeze(-1), b)
            s += l.item()
            l.div(accum).backward()
            if not j % accum:
                nn.utils.clip_grad_value_(model.parameters(), 0.5)
                opt.step()
                sched.step()
                opt.zero_grad()
        s /= len(loader)
        best = min(best, s)
        print(f"ep {ep} loss {s:.4f} best {best:.4f}")


if __name__ == "__main__":
    main()
