"""Predicted peak memory beside the measured one, and the chosen micro-batch beside the largest.

    python benchmarks/gpu_memory.py [predict] [choose] [--models NAME ...] [--json FILE]

On a machine without CUDA, `predict` prints what is predicted for a GPU that is not there.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wholebatch.loss import Loss, cross_entropy
from wholebatch.memory.calibrate import calibrate
from wholebatch.memory.checkpointing import with_checkpoints
from wholebatch.memory.choose import choose_micro_batch
from wholebatch.memory.predict import PlainWindow, predict_peak

GIB = 2**30
HAS_CUDA = torch.cuda.is_available()


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, w = x.shape
        q, k, v = (
            part.view(n, t, self.heads, w // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, w))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class GPT(nn.Module):
    def __init__(self, *, layers: int, width: int, heads: int, length: int, words: int = 50304):
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads, causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(self.norm(x))
        return result


class ViT(nn.Module):
    def __init__(self, *, layers: int = 12, width: int = 384, heads: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.layers = nn.ModuleList(Layer(width, heads, causal=False) for _ in range(layers))
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x.mean(1))
        return result


class Bottleneck(nn.Module):
    def __init__(self, before: int, inside: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, inside, 1, bias=False), nn.BatchNorm2d(inside)
        self.conv2 = nn.Conv2d(inside, inside, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(inside)
        self.conv3, self.norm3 = nn.Conv2d(inside, after, 1, bias=False), nn.BatchNorm2d(after)
        self.skip = (
            nn.Identity()
            if before == after and stride == 1
            else nn.Sequential(
                nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = F.relu(self.norm2(self.conv2(y)), inplace=True)
        return F.relu(self.norm3(self.conv3(y)) + self.skip(x), inplace=True)


def resnet(depths: tuple[int, ...], width: int = 64) -> nn.Module:
    stages: list[nn.Module] = [
        nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    before = width
    for stage, depth in enumerate(depths):
        inside = width * 2**stage
        for block in range(depth):
            stride = 2 if stage and not block else 1
            stages.append(Bottleneck(before, inside, 4 * inside, stride))
            before = 4 * inside
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    before = 3
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0):
        if width:
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(inplace=True)]
            before = width
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))


def loss(model: nn.Module, micro: dict[str, Tensor]) -> Loss:
    return cross_entropy(model(micro["x"]), micro["y"])


def texts(n: int, length: int) -> dict[str, Tensor]:
    return {name: torch.randint(0, 50304, (n, length)) for name in ("x", "y")}


def images(n: int, side: int = 224) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 3, side, side), "y": torch.randint(0, 1000, (n,))}


@dataclass(frozen=True)
class Model:
    kind: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    sizes: tuple[int, ...]


MODELS = {
    "gpt-163M": Model(
        "transformer",
        lambda: GPT(layers=12, width=768, heads=12, length=1024),
        lambda n: texts(n, 1024),
        (1, 4, 16),
    ),
    "gpt-1.1B": Model(
        "transformer",
        lambda: GPT(layers=24, width=1792, heads=14, length=2048),
        lambda n: texts(n, 2048),
        (1, 4),
    ),
    "gpt-31M-long": Model(
        "transformer",
        lambda: GPT(layers=6, width=256, heads=4, length=4096),
        lambda n: texts(n, 4096),
        (1, 8),
    ),
    "vit-s": Model("transformer", ViT, images, (8, 64)),
    "resnet-50": Model("cnn", lambda: resnet((3, 4, 6, 3)), images, (8, 32, 128)),
    "resnet-small": Model("cnn", lambda: resnet((1, 1, 1), 32), lambda n: images(n, 64), (16, 256)),
    "vgg-13": Model("cnn", vgg, lambda n: images(n, 128), (8, 64)),
}


def build(name: str, *, checkpointed: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    device = torch.device("cuda") if HAS_CUDA else torch.device("meta")
    with device:
        model = MODELS[name].make()
    if checkpointed:
        with_checkpoints(model)
    return model, torch.optim.AdamW(model.parameters())


def free() -> None:
    gc.collect()
    if HAS_CUDA:
        torch.cuda.empty_cache()


def on_device(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.cuda() for k, v in batch.items()} if HAS_CUDA else batch


def measured(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], precision: str
) -> tuple[int, int]:
    """Allocated and reserved bytes at the peak of a window of two micro-batches, state there."""
    free()
    window = PlainWindow(model, loss, optimizer=optimizer, precision=precision)
    micro = on_device(batch)
    window.run([micro])
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    window.run([micro, micro])
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def predict_all(names: list[str]) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        one = MODELS[name]
        for checkpointed in (False, True):
            if checkpointed and name in ("vgg-13",):
                continue
            for precision in ("full", "bf16"):
                model, optimizer = build(name, checkpointed=checkpointed)
                correction = None
                if HAS_CUDA:
                    small = one.sizes[0]
                    correction = calibrate(
                        model,
                        loss,
                        one.batch(2 * small),
                        precision=precision,
                        samples=(small, 2 * small),
                    )
                for size in one.sizes:
                    batch = one.batch(size)
                    predicted = predict_peak(
                        model, loss, batch, optimizer=optimizer, precision=precision, device="cuda"
                    )
                    row: dict[str, Any] = {
                        "model": name,
                        "kind": one.kind,
                        "size": size,
                        "precision": precision,
                        "checkpointed": checkpointed,
                        "predicted": predicted.peak,
                        "seconds": round(predicted.seconds, 2),
                    }
                    if correction is not None:
                        row["corrected"] = correction(size, predicted.peak)
                        row["measured"], row["reserved"] = measured(
                            model, optimizer, batch, precision
                        )
                    rows.append(row)
                    print(said(row), flush=True)
                del model, optimizer
                free()
    return rows


def said(row: dict[str, Any]) -> str:
    text = (
        f"{row['model']:13} b={row['size']:<4} {row['precision']:4}"
        f" {'ckpt' if row['checkpointed'] else '    '}"
        f" predicted {row['predicted'] / GIB:7.3f} GiB in {row['seconds']:5.2f} s"
    )
    if "measured" in row:
        real = row["measured"]
        text += (
            f"  measured {real / GIB:7.3f}  error {100 * (row['predicted'] / real - 1):+6.2f}%"
            f"  corrected {100 * (row['corrected'] / real - 1):+6.2f}%"
            f"  reserved/allocated {row['reserved'] / real:.3f}"
        )
    return text


def choose_all(names: list[str], limit: int = 16 * GIB) -> list[dict[str, Any]]:
    """The chosen micro-batch beside the largest that runs under a real limit of memory."""
    total = torch.cuda.get_device_properties(0).total_memory
    rows = []
    for name in names:
        one = MODELS[name]
        for precision in ("bf16",) if one.kind == "cnn" else ("full", "bf16"):
            if name == "gpt-1.1B":
                continue
            torch.cuda.set_per_process_memory_fraction(1.0)
            model, optimizer = build(name, checkpointed=False)
            small = one.sizes[0]
            began = time.perf_counter()
            torch.cuda.set_per_process_memory_fraction(limit / total)
            correction = calibrate(
                model, loss, one.batch(2 * small), precision=precision, samples=(small, 2 * small)
            )
            choice = choose_micro_batch(
                model,
                loss,
                one.batch(2),
                budget=limit,
                optimizer=optimizer,
                precision=precision,
                most=4096,
                correct=correction,
            )
            seconds = time.perf_counter() - began

            def runs(
                size: int,
                model: Any = model,
                optimizer: Any = optimizer,
                one: Model = one,
                precision: str = precision,
            ) -> bool:
                try:
                    measured(model, optimizer, one.batch(size), precision)
                    return True
                except torch.OutOfMemoryError:
                    return False
                finally:
                    optimizer.zero_grad(set_to_none=True)
                    torch.clear_autocast_cache()
                    free()

            ran = runs(choice.micro_batch)
            good, bad = (choice.micro_batch, math.ceil(choice.micro_batch * 1.5) + 2)
            if not ran:
                good, bad = 0, choice.micro_batch
            while bad - good > 1:
                middle = (good + bad) // 2
                good, bad = (middle, bad) if runs(middle) else (good, middle)
            row = {
                "model": name,
                "precision": precision,
                "chosen": choice.micro_batch,
                "ran": ran,
                "largest": good,
                "share": choice.micro_batch / good,
                "seconds": seconds,
                "predictions": len(choice.tried),
            }
            rows.append(row)
            print(row, flush=True)
            del model, optimizer
            free()
    torch.cuda.set_per_process_memory_fraction(1.0)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=["predict", "choose"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    found: dict[str, Any] = {"torch": torch.__version__}
    if "predict" in options.what:
        found["predict"] = predict_all(options.models)
    if "choose" in options.what and HAS_CUDA:
        found["choose"] = choose_all(options.models)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
