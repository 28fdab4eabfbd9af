# ruff: noqa
# reduced from bryanyzhu/two-stream-pytorch main_single_gpu.py
import time

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class AverageMeter:
    def __init__(self):
        self.val = self.sum = self.count = 0

    def update(self, v, n=1):
        self.val = v
        self.sum += v * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(self.count, 1)


def train(loader, model, criterion, optimizer, epoch, iter_size):
    batch_time, losses = AverageMeter(), AverageMeter()
    model.train()
    end = time.time()
    optimizer.zero_grad()
    loss_mini_batch = 0.0
    for i, (input, target) in enumerate(loader):
        output = model(input)
        loss = criterion(output, target) / iter_size
        loss_mini_batch += loss.item()
        loss.backward()

        if (i + 1) % iter_size == 0:
            optimizer.step()
            optimizer.zero_grad()
            losses.update(loss_mini_batch, input.size(0))
            batch_time.update(time.time() - end)
            end = time.time()
            loss_mini_batch = 0.0
    print(f"Epoch [{epoch}] Loss {losses.avg:.4f} Time {batch_time.avg:.4f}")


def main():
    torch.manual_seed(2)
    x, y = torch.randn(44, 3, 12, 12), torch.randint(0, 5, (44,))
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)  # 11 batches
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(200, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=5e-4)
    for epoch in range(3):
        train(loader, model, nn.CrossEntropyLoss(), optimizer, epoch, iter_size=4)


if __name__ == "__main__":
    main()
