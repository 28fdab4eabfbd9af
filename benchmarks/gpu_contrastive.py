"""Contrastive losses of large batches on a GPU: time and memory of two passes, side by side.

A ViT-B/32 (88 M parameters, bf16 autocast) encodes two views of every image; the loss is InfoNCE
over the whole batch. In one run: the whole batch at once, `wb.Coupled` and sentence-transformers'
cached loss, at a size where the first fits; then how the memory of the second grows with the batch;
then one update from 65,536 pairs.

    python benchmarks/gpu_contrastive.py                  # on CUDA; writes contrastive.json to $OUT
    python benchmarks/gpu_contrastive.py --small          # a look at the code path, anywhere

Images are drawn from a pool on the device by their numbers: 65,536 pairs of them would be 20 GB.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb

SCALE = 20.0


@dataclass(frozen=True)
class Size:
    """What is run, on the machine at hand or as a look at the code path."""

    device: str
    width: int
    depth: int
    side: int
    pool: int
    micro: int
    compared: int
    grown: tuple[int, ...]
    largest: int


LARGE = Size("cuda", 768, 12, 224, 512, 256, 1024, (256, 2048, 8192, 32768), 65536)
SMALL = Size("cpu", 32, 2, 64, 16, 8, 32, (8, 32), 64)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        count, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(count, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        wider: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + wider


class Tower(nn.Module):
    """ViT with patches of 32: images by their numbers in, one vector each out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, size.width, 32, 32)
        tokens = (size.side // 32) ** 2
        self.places = nn.Parameter(torch.randn(1, tokens, size.width) * 0.02)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.depth))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, 512, bias=False)
        pool = torch.randint(0, 256, (size.pool, 3, size.side, size.side), dtype=torch.uint8)
        self.register_buffer("pool", pool)
        self.pool: Tensor

    def forward(self, numbers: Tensor) -> Tensor:
        # Another pixel shift for every number, so that no two images of a batch are the same.
        images = self.pool[numbers % len(self.pool)].float() / 128.0 - 1.0
        images = images + ((numbers * 7919) % 9973 / 9973.0)[:, None, None, None]
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        made: Tensor = self.head(self.norm(x).mean(1))
        return made


def pairs(count: int, size: Size) -> dict[str, Tensor]:
    numbers = torch.arange(count, device=size.device)
    return {"a": numbers, "b": numbers + 100_000}


def encode(model: nn.Module, micro: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    a, b = model(torch.cat([micro["a"], micro["b"]])).chunk(2)
    return a, b


def loss(all: tuple[Tensor, Tensor]) -> wb.Loss:
    return wb.losses.info_nce(*all, temperature=1 / SCALE)


def measured(window: Callable[[], Any], size: Size, repeats: int) -> tuple[float, float]:
    """Median seconds of a window, and its peak in GiB."""
    cuda = size.device == "cuda"
    seconds = []
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        begun = time.perf_counter()
        window()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return statistics.median(seconds), peak


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def by_whole(size: Size, count: int) -> Callable[[], Any]:
    model = Tower(size).to(size.device)
    optimizer = optimizer_of(model)
    batch = pairs(count, size)

    def window() -> None:
        with torch.autocast(size.device, dtype=torch.bfloat16):
            a, b = encode(model, batch)
            a, b = F.normalize(a.float(), dim=-1), F.normalize(b.float(), dim=-1)
            total = F.cross_entropy(SCALE * (a @ b.T), torch.arange(count, device=a.device))
        total.backward()
        optimizer.step()
        optimizer.zero_grad()

    return window


def by_wholebatch(size: Size, count: int, micro: int, keep: int = 1) -> Callable[[], Any]:
    model = Tower(size).to(size.device)
    train = wb.WholeBatch(
        model,
        optimizer_of(model),
        loss=wb.Coupled(encode, loss, keep=keep),
        micro_batch=micro,
        precision="bf16",
    )
    batch = pairs(count, size)
    return lambda: train.step(batch)


def by_halves(size: Size, count: int, micro: int) -> Callable[[], Any]:
    """What two passes cannot go below: a forward, and a plain (wrong) window of micro-batches."""
    model = Tower(size).to(size.device)
    optimizer = optimizer_of(model)
    parts = wb.split(pairs(count, size), micro)

    def window() -> None:
        for backward in (False, True):
            for part in parts:
                with (
                    torch.autocast(size.device, dtype=torch.bfloat16),
                    torch.set_grad_enabled(backward),
                ):
                    total = loss(encode(model, part)).total if backward else encode(model, part)[0]
                if backward:
                    total.backward()
        optimizer.step()
        optimizer.zero_grad()

    return window


def by_sentence_transformers(size: Size, count: int, micro: int) -> Callable[[], Any] | str:
    """Their cached loss on the same tower; autocast around its forward, as Accelerate has it."""
    try:
        transformer = import_module("sentence_transformers").SentenceTransformer
        losses = import_module("sentence_transformers.sentence_transformer.losses")
    except ImportError as error:
        return f"not installed ({error})"

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = Tower(size)

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            with torch.autocast(size.device, dtype=torch.bfloat16):
                return {**features, "sentence_embedding": self.tower(features["input_ids"])}

    model = transformer(modules=[Wrapped()], device=size.device)
    optimizer = optimizer_of(model)
    # Two views of `micro` pairs go through the tower at once here: the same number of images.
    cached = losses.CachedMultipleNegativesRankingLoss(
        model, scale=SCALE, mini_batch_size=2 * micro
    )
    batch = pairs(count, size)
    features = [{"input_ids": batch["a"]}, {"input_ids": batch["b"]}]

    def window() -> None:
        with torch.autocast(size.device, dtype=torch.bfloat16):
            made = cached(features, torch.zeros(count, device=size.device))
        made.backward()
        optimizer.step()
        optimizer.zero_grad()

    return window


def line(name: str, count: int, seconds: float, peak: float, beside: float | None = None) -> None:
    ratio = "" if beside is None else f"  {seconds / beside:5.2f} x the whole batch"
    print(f"{name:24} {count:6} pairs {seconds:8.3f} s {peak:7.2f} GiB{ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    size = SMALL if given.small else LARGE
    found: dict[str, Any] = {"rows": []}

    def note(name: str, window: Callable[[], Any] | str, count: int, repeats: int) -> float | None:
        if isinstance(window, str):
            print(f"{name}: {window}", flush=True)
            return None
        seconds, peak = measured(window, size, repeats)
        line(name, count, seconds, peak, found.get("whole"))
        found["rows"].append({"name": name, "pairs": count, "seconds": seconds, "GiB": peak})
        _write(found)
        return seconds

    def warm(window: Callable[[], Any] | str) -> Callable[[], Any] | str:
        if not isinstance(window, str):
            window()
        return window

    whole = note("whole batch", warm(by_whole(size, size.compared)), size.compared, 3)
    found["whole"] = whole
    _empty(size)
    keeps: tuple[int, ...] = (0, 1, 2, size.compared // size.micro)
    for keep in keeps:
        window = warm(by_wholebatch(size, size.compared, size.micro, keep))
        note(f"wb.Coupled, keep={keep}", window, size.compared, 3)
        del window
        _empty(size)
    window = warm(by_halves(size, size.compared, size.micro))
    note("its two halves alone", window, size.compared, 3)
    del window
    _empty(size)
    theirs = by_sentence_transformers(size, size.compared, size.micro)
    note("sentence-transformers", warm(theirs), size.compared, 3)
    del theirs
    _empty(size)
    found.pop("whole")
    _empty(size)
    for count in size.grown:
        note("wb.Coupled, growing", by_wholebatch(size, count, size.micro), count, 1)
        _empty(size)
    note("wb.Coupled, largest", by_wholebatch(size, size.largest, size.micro), size.largest, 1)
    _empty(size)
    note(
        "sentence-transformers",
        by_sentence_transformers(size, size.grown[-2], size.micro),
        size.grown[-2],
        1,
    )


def _write(found: dict[str, Any]) -> None:
    folder = os.environ.get("OUT")
    if folder:
        Path(folder, "contrastive.json").write_text(json.dumps(found, indent=1) + "\n")


def _empty(size: Size) -> None:
    gc.collect()  # a trainer and its parts hold each other
    if size.device == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
