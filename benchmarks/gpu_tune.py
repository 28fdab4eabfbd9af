"""Is what `tune` recommends as fast as the fastest setting there is? On two models on a GPU.

    PYTHONPATH=src python3 benchmarks/gpu_tune.py [--out FOLDER] [--seconds 42]

The search runs as `tune` runs it; then what it left out (but for what does not fit) is measured
too, and the recommendation is compared with the fastest of all. `--seconds` is for each model: what
is not reached is said. Without CUDA it runs small models on the CPU, eagerly, to try itself.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb
from wholebatch.batch import batch_size_of
from wholebatch.readable_sizes import bytes_said
from wholebatch.tune import Task, Trial, tune
from wholebatch.tune.tuning import measure

NEEDED = 0.95
ON_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CUDA else "cpu")


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = self.down(functional.gelu(self.up(self.norm_2(x))))
        return x + added


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.token(ids) + self.place(places))))
        return logits


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(8, channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = functional.relu(norm(conv(y)))
        return x + y


def gpt() -> tuple[Task, int]:
    """Three layers of GPT: 34 M parameters, 32 sequences of 512 tokens."""
    width, layers, heads, vocabulary, length, samples = (
        (768, 3, 12, 16384, 512, 32) if ON_CUDA else (32, 2, 2, 64, 16, 8)
    )
    ids = torch.randint(0, vocabulary, (samples, length + 1))
    batch = {"ids": ids[:, :-1].clone(), "next": ids[:, 1:].clone()}
    return _workload(
        lambda: GPT(width, layers, heads, vocabulary, length),
        lambda model, micro: wb.cross_entropy(model(micro["ids"]), micro["next"]),
        lambda micro: micro["next"].numel(),
        batch,
    )


def cnn() -> tuple[Task, int]:
    """A residual network with GroupNorm: 256 images of 64 × 64."""
    channels, blocks, side, samples = (128, 4, 64, 256) if ON_CUDA else (8, 2, 8, 8)
    batch = {"x": torch.randn(samples, 3, side, side), "y": torch.randint(0, 10, (samples,))}

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, channels, 3, stride=2, padding=1),
            *(Residual(channels) for _ in range(blocks)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(channels, 10),
        )

    return _workload(
        model,
        lambda model, micro: wb.cross_entropy(model(micro["x"]), micro["y"]),
        lambda micro: len(micro["y"]),
        batch,
    )


def _workload(
    build: Callable[[], nn.Module],
    loss: Callable[[Any, Any], Any],
    units: Callable[[Any], int],
    batch: Any,
) -> tuple[Task, int]:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = build().to(DEVICE)
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    return Task(make, loss, lambda: batch, {"units": units}), batch_size_of(batch)


def show(trial: Trial, left: int) -> None:
    """Print a line for a setting that was measured."""
    rate, memory = trial.units_per_second, bytes_said(trial.peak or 0)
    print(f"  {trial.setting!s:40s} {rate:12.0f}/s {memory:>11s} {trial.why}", flush=True)


def check(name: str, made: tuple[Task, int], seconds: float) -> dict[str, Any]:
    """Run the search on one model, then measure what it has skipped."""
    task, samples = made
    print(name, flush=True)
    found = tune(
        task,
        micro_batches=[samples, samples // 2, samples // 4, samples // 8],
        precisions=("full", "bf16"),
        seconds=seconds,
        window_seconds=0.15,
        watch=show,
    )
    trials, missed = list(found.trials), []
    skipped = [t for t in trials if t.status == "skipped" and (t.predicted or 0) <= found.budget]
    print(f"  searched {found.seconds:.1f} s; skipped: {len(skipped)}", flush=True)
    began = time.perf_counter()
    for trial in skipped:
        if time.perf_counter() - began > seconds:
            missed.append(str(trial.setting))
            continue
        trials.append(measure(task, trial, seconds=0.15, budget=found.budget))
        show(trials[-1], 0)
    fastest = max(
        (trial for trial in trials if trial.is_measured), key=lambda trial: trial.units_per_second
    )
    share = found.best.units_per_second / fastest.units_per_second
    row = {
        "model": name,
        "recommended": str(found.best.setting),
        "fastest": str(fastest.setting),
        "share": share,
        "fixed_cost_ms": None if found.fixed_cost is None else 1000 * found.fixed_cost,
        "measured_by_search": sum(trial.seconds is not None for trial in found.trials),
        "measured_in_all": sum(trial.seconds is not None for trial in trials),
        "not_reached": missed,
        "search_seconds": round(found.seconds, 1),
        "trials": [trial.to_dict() for trial in trials],
    }
    short = {key: value for key, value in row.items() if key != "trials"}
    print(f"  {'RIGHT' if share >= NEEDED else 'WRONG'} {json.dumps(short)}", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build"))
    parser.add_argument("--seconds", type=float, default=42.0)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if ON_CUDA else "cpu"
    print(f"{device}, torch {torch.__version__}", flush=True)
    data: dict[str, Any] = {"device": device, "torch": torch.__version__, "rows": []}
    for name, model in (("gpt", gpt), ("cnn", cnn)):
        data["rows"].append(check(name, model(), given.seconds))
        (given.out / "gpu_tune.json").write_text(json.dumps(data, indent=1) + "\n")
    return 0 if all(row["share"] >= NEEDED for row in data["rows"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
