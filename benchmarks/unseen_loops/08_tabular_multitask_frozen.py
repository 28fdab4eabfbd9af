# ruff: noqa
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.body = nn.Sequential(nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.price = nn.Linear(16, 1)
        self.kind = nn.Linear(16, 3)

    def forward(self, x):
        h = self.body(self.embed(x))
        return self.price(h).squeeze(1), self.kind(h)


def fit(model, loader, epochs=2, accumulation_steps=4, alpha=0.3):
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    mse, ce = nn.MSELoss(), nn.CrossEntropyLoss()
    optimizer.zero_grad()
    for epoch in range(epochs):
        if epoch == 1:
            model.price.requires_grad_(False)
        log = []
        for batch_idx, (x, y, k) in enumerate(loader):
            p, c = model(x)
            loss = mse(p, y) + alpha * ce(c, k)
            log.append(loss.item())
            scaler.scale(loss / accumulation_steps).backward()
            if (batch_idx + 1) % accumulation_steps == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
        print(epoch, sum(log) / len(log))


def main():
    torch.manual_seed(40)
    ds = TensorDataset(torch.randn(70, 8), torch.randn(70), torch.randint(0, 3, (70,)))
    ds = torch.utils.data.Subset(ds, range(64))
    model = MultiTask()
    model.embed.requires_grad_(False)
    fit(model, DataLoader(ds, batch_size=8, shuffle=True))


if __name__ == "__main__":
    main()
