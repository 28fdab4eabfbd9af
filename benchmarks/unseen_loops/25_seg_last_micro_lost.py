# ruff: noqa
import torch
import torch.nn as nn
import torch.nn.functional as F


def build():
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(12, 3, 1),
    )


def batches(n, bs=2):
    for _ in range(n):
        yield torch.randn(bs, 3, 12, 12), torch.randint(0, 3, (bs, 12, 12))


def main(accum=4, epochs=2, n=12):
    torch.manual_seed(24)
    model = build()
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        total = 0.0
        for i, (x, y) in enumerate(batches(n)):
            boundary = (i + 1) % accum == 0
            if boundary:
                opt.step()
            loss = F.cross_entropy(model(x), y)
            (loss / accum).backward()
            if boundary:
                opt.zero_grad()
            total += loss.item()
        print(f"epoch {epoch}: {total / n:.4f}")


if __name__ == "__main__":
    main()
