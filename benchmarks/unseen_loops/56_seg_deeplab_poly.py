# ruff: noqa
# reduced from isht7/pytorch-deeplab-resnet train.py
import torch
import torch.nn as nn
import torch.nn.functional as F

iter_size = 5
max_iter = 20
base_lr = 0.02


def lr_poly(base, it, total, power):
    return base * ((1 - float(it) / total) ** power)


def chunker(n, size):
    i = 0
    while True:
        yield [(i + j) % n for j in range(size)]
        i = (i + size) % n


def train():
    torch.manual_seed(3)
    images = torch.randn(12, 3, 10, 10)
    labels = torch.randint(0, 4, (12, 10, 10))
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=base_lr, momentum=0.9)
    optimizer.zero_grad()
    gen = chunker(len(images), 2)
    for iter in range(max_iter + 1):
        chunk = next(gen)
        out = model(images[chunk])
        loss = F.cross_entropy(out, labels[chunk])
        loss = loss / iter_size
        loss.backward()
        print("iter =", iter, "of", max_iter, "completed, loss =", iter_size * loss.item())
        if iter % iter_size == 0:
            optimizer.step()
            lr_ = lr_poly(base_lr, iter, max_iter, 0.9)
            for g in optimizer.param_groups:
                g["lr"] = lr_
            optimizer.zero_grad()


if __name__ == "__main__":
    train()
