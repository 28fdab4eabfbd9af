# ruff: noqa
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, stride=2)
        self.bn = nn.BatchNorm2d(12)
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        return self.head(self.bn(self.conv(x)).relu().mean((2, 3)))

    def train(self, mode=True):
        super().train(mode)
        self.bn.eval()  # pretrained statistics stay as they are
        return self


def main(accum=3, epochs=2):
    torch.manual_seed(45)
    model = Backbone()
    model.bn.running_mean.normal_()
    model.bn.running_var.uniform_(0.5, 2)
    model.train()
    ds = TensorDataset(torch.randn(45, 3, 9, 9), torch.randint(0, 4, (45,)))
    loader = DataLoader(ds, batch_size=5, shuffle=True)
    opt = torch.optim.SGD(
        [
            {"params": model.conv.parameters(), "lr": 1e-3},
            {"params": list(model.bn.parameters()) + list(model.head.parameters())},
        ],
        lr=1e-2,
        momentum=0.9,
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(epochs):
        epoch_loss = 0.0
        for it, (x, y) in enumerate(loader):
            if it % accum == 0:
                opt.zero_grad()
            loss = criterion(model(x), y)
            epoch_loss += loss.item()
            (loss / accum).backward()
            if it % accum == accum - 1:
                opt.step()
        print(f"{epoch}: {epoch_loss / len(loader):.4f}")


if __name__ == "__main__":
    main()
