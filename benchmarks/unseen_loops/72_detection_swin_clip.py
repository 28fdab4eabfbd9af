# ruff: noqa
# training loop after microsoft/Swin-Transformer main_simmim_ft.py, with a toy detector
import torch
from torch import nn
from torch.nn import functional as F


class Detector(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(16, 16, 3, stride=2, padding=1),
            nn.GELU(),
        )
        self.cls = nn.Linear(16, classes)
        self.box = nn.Linear(16, 4)

    def forward(self, x):
        f = self.body(x).mean((2, 3))
        return self.cls(f), self.box(f).sigmoid()


def train_one_epoch(cfg, model, loader, optimizer, epoch, scheduler):
    model.train()
    optimizer.zero_grad()
    meter = []
    for idx, (img, label, box) in enumerate(loader):
        logits, pred = model(img)
        loss = F.cross_entropy(logits, label) + 5 * F.smooth_l1_loss(pred, box)
        loss = loss / cfg["accumulation_steps"]
        loss.backward()
        if cfg["clip_grad"]:
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), cfg["clip_grad"])
        else:
            grad_norm = None
        if (idx + 1) % cfg["accumulation_steps"] == 0:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        meter.append(loss.item() * cfg["accumulation_steps"])
    print(f"epoch {epoch} loss {sum(meter) / len(meter):.4f} grad_norm {grad_norm:.3f}")


def main():
    cfg = {"accumulation_steps": 4, "clip_grad": 0.05, "epochs": 2}
    torch.manual_seed(4)
    loader = [
        (torch.randn(3, 3, 16, 16), torch.randint(0, 3, (3,)), torch.rand(3, 4)) for _ in range(12)
    ]
    model = Detector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    for epoch in range(cfg["epochs"]):
        train_one_epoch(cfg, model, loader, optimizer, epoch, scheduler)


if __name__ == "__main__":
    main()
