# ruff: noqa
# reduced from kazuto1011/deeplab-pytorch main.py
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

ITER_SIZE, ITER_MAX, BATCH = 2, 10, 3


class PolyLR(torch.optim.lr_scheduler.LambdaLR):
    def __init__(self, optimizer, iter_max, power=0.9):
        super().__init__(optimizer, lambda it: (1 - it / (iter_max + 1)) ** power)


def main():
    torch.manual_seed(33)
    ds = TensorDataset(torch.randn(18, 3, 9, 9), torch.randint(0, 5, (18, 9, 9)))
    loader = DataLoader(ds, batch_size=BATCH, shuffle=True)
    loader_iter = iter(loader)
    model = nn.Sequential(
        nn.Conv2d(3, 10, 3, padding=1), nn.ReLU(), nn.Conv2d(10, 5, 3, padding=2, dilation=2)
    )
    criterion = nn.CrossEntropyLoss(ignore_index=-1)
    optimizer = torch.optim.SGD(
        [
            {"params": model[0].parameters(), "lr": 0.01},
            {"params": model[2].parameters(), "lr": 0.1},
        ],
        momentum=0.9,
        weight_decay=5e-4,
    )
    scheduler = PolyLR(optimizer, ITER_MAX)
    for iteration in range(1, ITER_MAX + 1):
        # Clear gradients (ready to accumulate)
        optimizer.zero_grad()
        loss = 0
        for _ in range(ITER_SIZE):
            try:
                images, labels = next(loader_iter)
            except StopIteration:
                loader_iter = iter(loader)
                images, labels = next(loader_iter)
            logits = model(images)
            iter_loss = criterion(logits, labels)
            # Propagate backward (just compute gradients)
            iter_loss /= ITER_SIZE
            iter_loss.backward()
            loss += float(iter_loss)
        # Update weights with accumulated gradients
        optimizer.step()
        scheduler.step()
        if iteration % 5 == 0:
            print(f"iter {iteration} loss {loss:.4f}")


if __name__ == "__main__":
    main()
