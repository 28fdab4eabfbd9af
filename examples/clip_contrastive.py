"""CLIP in small: the contrastive update of 128 pairs from micro-batches of 8.

    python examples/clip_contrastive.py

Images show a coloured square somewhere; texts name its colour and place. Three ways to train from
the same start: the undivided batch, `wb.Coupled` (every pair is compared with all 128), and plain
accumulation (with 8). Printed are the distance of the first gradient from that of the undivided
batch, the memory that a step took, and how many texts find their image among 256 after training.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.memory import MemoryMeter

Batch = dict[str, Tensor]
COLOURS, PLACES, SIDE = 16, 16, 16


class Clip(nn.Module):
    """An image tower, a text tower, and a temperature that is learned."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(32, 32, 4, 4),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(32 * (SIDE // 4) ** 2, 2 * width),
            nn.GELU(),
            nn.Linear(2 * width, width),
        )
        self.words = nn.Embedding(COLOURS + PLACES, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.text = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.log_scale = nn.Parameter(torch.tensor(2.0))


def encode(model: Clip, micro: Batch) -> tuple[Tensor, Tensor]:
    """What is known about each sample alone: its two representations."""
    return model.image(micro["image"]), model.text(model.words(micro["text"])).mean(1)


def loss_of(model: Clip) -> Callable[[tuple[Tensor, Tensor]], wb.Loss]:
    """The loss of a whole batch, from all representations."""

    def loss(all: tuple[Tensor, Tensor]) -> wb.Loss:
        return wb.losses.clip_loss(*all, scale=model.log_scale.exp())

    return loss


def pairs(number: int, seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    kinds = torch.randperm(COLOURS * PLACES, generator=draw)[:number]
    colours, places = kinds // PLACES, kinds % PLACES
    palette = torch.rand(COLOURS, 3, generator=torch.Generator().manual_seed(1))
    image = 0.1 * torch.randn(len(kinds), 3, SIDE, SIDE, generator=draw)
    for one, colour, place in zip(image, colours.tolist(), places.tolist(), strict=True):
        row, column = 4 * (place // 4), 4 * (place % 4)
        one[:, row : row + 4, column : column + 4] += palette[colour][:, None, None]
    text = torch.stack([colours, COLOURS + places], 1)
    return {"image": image.double(), "text": text}


def undivided(model: Clip, optimizer: torch.optim.Optimizer) -> Callable[[Batch], object]:
    def step(batch: Batch) -> None:
        loss = loss_of(model)(encode(model, batch))
        (loss.total / loss.units).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain(model: Clip, optimizer: torch.optim.Optimizer, micro_batch: int) -> Callable[..., object]:
    def step(batch: Batch) -> None:
        for micro in wb.split(batch, micro_batch):
            loss = loss_of(model)(encode(model, micro))
            (loss.total / len(batch["text"])).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def coupled(
    model: Clip, optimizer: torch.optim.Optimizer, micro_batch: int
) -> Callable[..., object]:
    loss = wb.Coupled(encode, loss_of(model))
    return wb.WholeBatch(model, optimizer, loss=loss, micro_batch=micro_batch).step


@torch.no_grad()
def found(model: Clip) -> float:
    """The share of texts whose own image is the nearest of 256 that were not trained on."""
    image, text = (nn.functional.normalize(z, dim=-1) for z in encode(model, pairs(256, 10_000)))
    return float(((text @ image.T).argmax(1) == torch.arange(256)).double().mean())


def main(updates: int = 20, batch: int = 128, micro_batch: int = 8) -> dict[str, tuple[float, ...]]:
    start = Clip().double()
    rows: dict[str, tuple[float, ...]] = {}
    first: list[Tensor] = []
    for name in ("undivided", "wb.Coupled", "plain accumulation"):
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        seen = gradients_of(model, optimizer)
        if name == "undivided":
            step = undivided(model, optimizer)
        else:
            step = (coupled if name == "wb.Coupled" else plain)(model, optimizer, micro_batch)
        with MemoryMeter(model=model, optimizer=optimizer) as meter:
            step(pairs(batch, 0))
        made = seen[0]
        first = first or made
        far = distance(made, first)
        for number in range(1, updates):
            step(pairs(batch, number))
        rows[name] = (far, meter.peak / 2**20, found(model))
        print(
            f"{name:20} gradient off by {far:8.1e}  peak {meter.peak / 2**20:5.1f} MiB  "
            f"finds {rows[name][2]:4.0%} of 256"
        )
    usual, ours = rows["plain accumulation"], rows["wb.Coupled"]
    print(
        f"Shown: the gradient is off by {usual[0]:.0%} in the usual loop, by {ours[0]:.0e} with "
        f"wb.Coupled, which takes {ours[1]:.1f} MiB; the undivided batch takes "
        f"{rows['undivided'][1]:.1f} MiB."
    )
    return rows


def gradients_of(model: Clip, optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """What each update was made from."""
    seen: list[list[Tensor]] = []

    def look(*_: object) -> None:
        seen[:] = seen[:1] or [[p.grad.clone() for p in model.parameters() if p.grad is not None]]

    optimizer.register_step_pre_hook(look)
    return seen


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    above = sum(float((x - y).square().sum()) for x, y in zip(a, b, strict=True))
    return float((above / sum(float(y.square().sum()) for y in b)) ** 0.5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=20)
    main(parser.parse_args().updates)
