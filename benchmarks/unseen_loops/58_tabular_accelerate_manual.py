# ruff: noqa
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(k=4):
    torch.manual_seed(62)
    accelerator = Accelerator(cpu=True)
    X, y = torch.randn(60, 6), torch.randn(60)
    loader = DataLoader(TensorDataset(X, y), batch_size=6, shuffle=True)  # 10 batches
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    model, opt, loader = accelerator.prepare(model, opt, loader)
    n = len(loader)
    for epoch in range(3):
        for i, (a, b) in enumerate(loader):
            in_window = min(k, n - i // k * k)
            loss = nn.functional.mse_loss(model(a).squeeze(-1), b)
            accelerator.backward(loss / in_window)
            if (i + 1) % k == 0 or i + 1 == n:
                accelerator.clip_grad_norm_(model.parameters(), 2.0)
                opt.step()
                opt.zero_grad()
        print(f"epoch {epoch} mse {loss.item():.4f}")


if __name__ == "__main__":
    main()
