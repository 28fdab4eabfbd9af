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
from wholebatch.memory.budget import parse_memory
from wholebatch.readable_sizes import bytes_said
from wholebatch.tune import Limits, RunMode, Setting, Trial
from wholebatch.tune.bottleneck import fixed_cost, name_bottleneck
from wholebatch.tune.machine_speed import copy_bandwidth, share_of_arithmetic
from wholebatch.tune.settings import Predicted
from wholebatch.tune.tuning import Search
from wholebatch.tune.window_timing import Workload

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


def gpt() -> tuple[Workload, int]:
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


def cnn() -> tuple[Workload, int]:
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
) -> tuple[Workload, int]:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = build().to(DEVICE)
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    return Workload(make, loss, lambda: batch, {"units": units}), batch_size_of(batch)


class Lines:
    """A line for everything that was measured, at once."""

    def __init__(self) -> None:
        self.began = time.perf_counter()

    def begin(self, setting: Setting, *, of: int) -> None:
        pass

    def end(self, trial: Trial) -> None:
        rate = trial.units_per_second or 0.0
        memory = bytes_said(trial.peak or 0)
        at = time.perf_counter() - self.began
        print(
            f"  {at:5.1f}s {trial.setting.said():40s} {rate:12.0f}/s {memory:>11s} {trial.why}",
            flush=True,
        )


def check(name: str, made: tuple[Workload, int], seconds: float) -> dict[str, Any]:
    """One model: the search, then what it left out."""
    workload, samples = made
    print(name, flush=True)
    modes = [RunMode("full", False, "eager", "auto"), RunMode("bf16", False, "eager", "auto")]
    modes += [RunMode("bf16", False, "graph", "auto")] if ON_CUDA else []
    modes += [RunMode("bf16", True, "eager", "auto")]
    sizes = [samples, samples // 2, samples // 4, samples // 8]
    model, optimizer = workload.make()
    device, dtype = (one := next(model.parameters())).device, one.dtype
    budget = parse_memory("free", device=device)
    predicted = Predicted(model, optimizer, workload.loss, workload.batches(), samples, budget)
    del model, optimizer
    limits = Limits(total=seconds, seconds=0.15, least=5, most=20, warm_up=15.0)
    search = Search(
        workload, samples, predicted, budget, limits, sizes=sizes, modes=modes, watch=Lines()
    )
    search.run()
    best = search.recommended()
    assert best is not None
    searched = time.perf_counter() - search._began
    by_search = sum(trial.windows > 0 for trial in search.trials.values())
    left_out = [
        trial.setting
        for trial in search.trials.values()
        if trial.status == "pruned" and not trial.why.startswith("predicted to need")
    ]
    print(f"  searched {searched:.1f} s; left out: {len(left_out)}", flush=True)
    missed = []
    for setting in left_out:
        if time.perf_counter() - search._began > seconds:
            missed.append(setting.said())
            continue
        del search.trials[setting]
        search._measure(setting, stops=False)
    fastest = search.best
    assert fastest is not None
    share = (best.units_per_second or 0.0) / (fastest.units_per_second or 1.0)
    alike = [t for t in search.trials.values() if t.setting.mode == best.setting.mode and t.seconds]
    used = share_of_arithmetic(workload, best, workload.batches(), device=device, dtype=dtype)
    copies = copy_bandwidth(device)
    held = sum(p.nbytes for p in workload.make()[0].parameters())
    fixed = fixed_cost(alike, moving=3 * held / copies)
    named = name_bottleneck(best, fixed=fixed, used=used, bandwidth=copies)
    row = {
        "model": name,
        "recommended": best.setting.said(),
        "fastest": fastest.setting.said(),
        "share": share,
        "bottleneck": named.kind,
        "evidence": named.evidence,
        "split_ms": {part: round(1000 * s, 3) for part, s in best.split.items() if s},
        "measured_by_search": by_search,
        "measured_in_all": sum(trial.windows > 0 for trial in search.trials.values()),
        "not_reached": missed,
        "search_seconds": round(searched, 1),
        "trials": [trial.to_dict() for trial in search.trials.values()],
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
