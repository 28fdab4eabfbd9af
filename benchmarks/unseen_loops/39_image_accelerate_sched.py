# ruff: noqa
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(epochs=2, accum=4):
    torch.manual_seed(69)
    accelerator = Accelerator(gradient_accumulation_steps=accum, cpu=True)
    ds = TensorDataset(torch.randn(48, 1, 10, 10), torch.randint(0, 3, (48,)))
    loader = DataLoader(ds, batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(100, 32), nn.GELU(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    updates = epochs * len(loader) // accum
    sched = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=updates)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                sched.step()
                optimizer.zero_grad()
        print(f"epoch {epoch} loss {loss.item():.4f} lr {sched.get_last_lr()[0]:.2e}")


if __name__ == "__main__":
    main()
