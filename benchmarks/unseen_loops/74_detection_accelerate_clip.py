# ruff: noqa
import torch
from accelerate import Accelerator
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class BoxNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 32), nn.ReLU())
        self.cls, self.reg = nn.Linear(32, 5), nn.Linear(32, 4)

    def forward(self, x):
        h = self.f(x)
        return self.cls(h), self.reg(h)


def main():
    torch.manual_seed(68)
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    ds = TensorDataset(torch.randn(48, 3, 8, 8), torch.randint(0, 5, (48,)), torch.rand(48, 4))
    loader = DataLoader(ds, batch_size=3, shuffle=True)
    model = BoxNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for step, (img, label, box) in enumerate(loader):
            with accelerator.accumulate(model):
                cls, reg = model(img)
                loss = F.cross_entropy(cls, label) + F.smooth_l1_loss(reg, box)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
