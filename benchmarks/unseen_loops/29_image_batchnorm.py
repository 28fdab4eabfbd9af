# ruff: noqa
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def conv_bn(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())


class Net(nn.Module):
    def __init__(self, classes=6):
        super().__init__()
        self.features = nn.Sequential(conv_bn(3, 8), nn.MaxPool2d(2), conv_bn(8, 16))
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        return self.fc(self.features(x).mean((2, 3)))


def train(model, loader, optimizer, epochs, accum_iter):
    criterion = nn.CrossEntropyLoss()
    model.train()
    for epoch in range(epochs):
        running = 0.0
        for i, (x, y) in enumerate(loader):
            loss = criterion(model(x), y)
            running += loss.item()
            (loss / accum_iter).backward()
            if (i + 1) % accum_iter == 0:
                optimizer.step()
                optimizer.zero_grad()
        print("epoch", epoch, running / len(loader))


if __name__ == "__main__":
    torch.manual_seed(15)
    ds = TensorDataset(torch.randn(48, 3, 8, 8), torch.randint(0, 6, (48,)))
    net = Net()
    train(
        net,
        DataLoader(ds, batch_size=3, shuffle=True),
        torch.optim.SGD(net.parameters(), 0.05),
        2,
        accum_iter=4,
    )
