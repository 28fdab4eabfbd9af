# ruff: noqa
import torch
from torch import nn


def l1_penalty(model):
    return sum(p.abs().sum() for n, p in model.named_parameters() if n.endswith("weight"))


def main(lam=1e-3, steps=4, micro=8):
    torch.manual_seed(13)
    X = torch.randn(96, 12)
    y = X @ torch.randn(12) + 0.3 * torch.randn(96)
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    for epoch in range(3):
        order = torch.randperm(96)
        opt.zero_grad()
        mse_sum = 0.0
        for i, idx in enumerate(order.split(micro)):
            mse = nn.functional.mse_loss(model(X[idx]).squeeze(-1), y[idx])
            loss = mse / steps + lam * l1_penalty(model)
            loss.backward()
            mse_sum += mse.item()
            if i % steps == steps - 1:
                opt.step()
                opt.zero_grad()
        print(f"epoch {epoch}: mse {mse_sum / (i + 1):.4f} l1 {l1_penalty(model).item():.2f}")


if __name__ == "__main__":
    main()
