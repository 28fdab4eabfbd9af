"""Train CLIP in small: pictures of a coloured square, and texts that name its colour and place.

    python examples/train_clip.py
    python examples/train_clip.py --resume   # after a stop, from the last checkpoint

A contrastive loss compares every pair with all others of the batch. `wb.Coupled` compares with the
whole batch of `--batch-size`, in the memory of `--micro-batch` pairs.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import wholebatch as wb

COLOURS, PLACES, SIDE = 16, 16, 16


class Clip(nn.Module):
    """An image tower, a text tower, and a learned temperature."""

    def __init__(self, width=64):
        super().__init__()
        convolutions = nn.Conv2d(3, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 32, 4, 4), nn.GELU()
        self.image = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, width))
        self.words = nn.Embedding(COLOURS + PLACES, width)
        self.text = nn.Sequential(nn.Linear(2 * width, 128), nn.GELU(), nn.Linear(128, width))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def encode(self, images, texts):
        return self.image(images), self.text(self.words(texts).flatten(1))


def pairs(number, seed):
    draw = torch.Generator().manual_seed(seed)
    palette = torch.rand(COLOURS, 3, generator=torch.Generator().manual_seed(1))
    colours = torch.randint(0, COLOURS, (number,), generator=draw)
    places = torch.randint(0, PLACES, (number,), generator=draw)
    images = 0.1 * torch.randn(number, 3, SIDE, SIDE, generator=draw)
    for image, colour, place in zip(images, colours, places, strict=True):
        row, column = 4 * (place // 4), 4 * (place % 4)
        image[:, row : row + 4, column : column + 4] += palette[colour][:, None, None]
    return TensorDataset(images, torch.stack([colours, COLOURS + places], 1))


@torch.no_grad()
def evaluate(model, device):
    """Return the share of the 256 texts that are nearest to a picture of what they name."""
    images, texts = pairs(2048, seed=10_000).tensors
    every = torch.cartesian_prod(torch.arange(COLOURS), COLOURS + torch.arange(PLACES))
    image, text = (
        nn.functional.normalize(z, dim=-1)
        for z in model.encode(images.to(device), every.to(device))
    )
    nearest = (text @ image.T).argmax(1).cpu()
    return (texts[nearest] == every).all(1).float().mean().item()


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=128, help="pairs that are compared")
    parser.add_argument("--micro-batch", type=int, default=32, help="pairs in memory at a time")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--precision", choices=["full", "bf16", "fp16"], default="full")
    parser.add_argument("--save", type=Path, default=Path("clip.pt"))
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    order = torch.Generator()
    loader = DataLoader(pairs(2048, seed=0), args.batch_size, shuffle=True, generator=order)
    model = Clip().to(device)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    updates = args.epochs * len(loader)  # one per batch
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=updates)

    def encode(model, micro):  # what is known about each pair alone
        return model.encode(*micro)

    def loss(encoded):  # the loss of the whole batch, from all representations
        return wb.losses.clip_loss(*encoded, scale=model.log_scale.exp())

    train = wb.WholeBatch(
        model, optimizer, loss=wb.Coupled(encode, loss), micro_batch=args.micro_batch,
        precision=args.precision, clip_norm=1.0, scheduler=scheduler, close=wb.Close(ema=ema),
    )  # fmt: skip
    state = {"model": model, "ema": ema, "optimizer": optimizer, "windows": train}
    if args.resume:
        saved = torch.load(args.save, map_location=device, weights_only=True)
        for name, part in state.items():
            part.load_state_dict(saved[name])
        if scheduler.total_steps != updates:
            parser.error(f"{args.save}: a run of {scheduler.total_steps} updates, not {updates}")

    for epoch in range((train.updates + train.skipped) // len(loader), args.epochs):
        order.manual_seed(epoch)  # a resumed run sees the same order
        bar = tqdm(loader, desc=f"epoch {epoch + 1}")
        for batch in bar:
            step = train.step(batch)
            bar.set_postfix(loss=f"{step.loss:.3f}")
        print(
            f"epoch {epoch + 1}: {evaluate(ema.module, device):.0%} of the texts find their picture"
        )
        torch.save({name: part.state_dict() for name, part in state.items()}, args.save)


if __name__ == "__main__":
    main()
