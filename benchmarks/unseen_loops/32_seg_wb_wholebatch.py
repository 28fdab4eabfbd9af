# ruff: noqa
import torch
from torch import nn

import wholebatch as wb


def pixel_loss(model, micro):
    return wb.cross_entropy(model(micro["image"]), micro["mask"])


def main():
    torch.manual_seed(53)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    images, masks = torch.randn(30, 1, 8, 8), torch.randint(0, 3, (30, 8, 8))
    masks[torch.rand(masks.shape) < 0.2] = -100
    train = wb.WholeBatch(model, optimizer, loss=pixel_loss, micro_batch=3)
    for epoch in range(2):
        for idx in torch.arange(30).split(10):
            step = train.step({"image": images[idx], "mask": masks[idx]})
            print(
                f"epoch {epoch} update {step.update} loss {float(step.loss):.4f} pixels {step.units}"
            )


if __name__ == "__main__":
    main()
