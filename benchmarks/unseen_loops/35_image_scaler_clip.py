# ruff: noqa
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_epoch(model, loader, optimizer, scaler, criterion, accum, max_norm):
    model.train()
    losses = 0.0
    for step, (images, labels) in enumerate(loader):
        out = model(images)
        loss = criterion(out, labels) / accum
        scaler.scale(loss).backward()
        losses += loss.item() * accum
        if (step + 1) % accum == 0:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return losses / len(loader)


def main():
    torch.manual_seed(23)
    ds = TensorDataset(torch.randn(64, 1, 10, 10), torch.randint(0, 10, (64,)))
    loader = DataLoader(ds, batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(100, 64), nn.GELU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for epoch in range(2):
        print(epoch, train_epoch(model, loader, optimizer, scaler, nn.CrossEntropyLoss(), 4, 1.0))


if __name__ == "__main__":
    main()
