"""What commands write, small: a run, a plan, a tuning, verdicts, a benchmark."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

CATEGORIES = ("parameters", "gradients", "optimizer state", "activations")


def record(window: int, **more: Any) -> dict[str, Any]:
    return {
        "window": window,
        "update": window,
        "epoch": 0,
        "loss": 2 + math.exp(-window / 20),
        "units": 640.0,
        "grad_norm": 1 + 1 / window,
        "clip": 1.0,
        "lr": 0.01,
        "micro_batches": 8,
        "loss_scale": 1.0,
        "skipped": None,
        "seconds": 0.5,
        "units_per_second": 1280.0,
        "time": 1000.0 + window,
        **more,
    }


def write_run(folder: Path, *, windows: int = 30, lr: float | None = None, **more: Any) -> Path:
    folder.mkdir(parents=True)
    settings = {"batch_size": 64, "micro_batch": 8, "steps": windows, "precision": "full"}
    settings |= {"clip_norm": 1.0, "lr": lr, "seed": 0, "checkpoint_every": 10}
    config = {"recipe": "bytes-gpt", "settings": settings, "device": "cpu", "torch": "2.13.0"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "manifest.json").write_text(json.dumps({"unit": "bytes"}))
    more = {"lr": lr or 0.01, **more}
    lines = [json.dumps(record(window, **more)) for window in range(1, windows + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def plan() -> dict[str, Any]:
    points = [
        {
            "micro_batch": size,
            "peak": 300 * 2**20 + size * 2**22,
            "by_category": {name: 2**20 * (1 + at) for at, name in enumerate(CATEGORIES)},
            "fits": size < 32,
        }
        for size in (1, 8, 32)
    ]
    chosen = {"batch_size": 64, "ranks": 1, "micro_batch": 8, "precision": "bf16"}
    return {"subject": "gpt", "budget": 400 * 2**20, "points": points, **chosen}


def verdict(*, same: bool = True) -> dict[str, Any]:
    off = 1e-7 if same else 0.3
    line = {"name": "head.weight", "numbers": 1000, "distance": off, "floor": 1e-8}
    comparison = {"distance": off, "floor": 1e-8, "tolerance": 1e-6}
    cause = {"kind": "dropout", "where": ["drop"], "evidence": "it draws <again>", "advice": "Off."}
    return {
        "same": same,
        "line": "same update: gradient 1.0e-07 off" if same else "DIFFERENT update: gradient 30%",
        "gradient": {"what": "gradient", "lines": [{**line, "differs": not same}], **comparison},
        "update": {"what": "update", "lines": [], **comparison},
        "float64": None,
        "causes": [] if same else [cause],
        "notes": [],
    }


def loop_verdict() -> dict[str, Any]:
    trials = [
        {
            "case": "mlp",
            "name": f"window {number}",
            "optimizer_steps": 1,
            "found": found,
            "tolerance": 1e-6,
            "fits": [{"key": "right", "variant": "", "distance": off, "fits": off < 1e-6}],
        }
        for number, (found, off) in enumerate([("right", 0.0), ("mean_of_means", 0.2), (None, 3.0)])
    ]
    return {"same": False, "line": "DIFFERENT update: mean of means", "trials": trials, "loop": "x"}


def trial(micro_batch: int, rate: float, **more: Any) -> dict[str, Any]:
    split = {"data": 0.001, "forward": 0.1, "backward": 0.2, "addition": 0.01}
    split |= {"communication": 0.0, "optimizer": 0.02, "idle": 0.005}
    return {
        "micro_batch": micro_batch,
        "steps": -(-64 // micro_batch),
        "precision": "full",
        "checkpointing": False,
        "execute": "eager",
        "sync": "single",
        "units_per_second": rate,
        "peak": 10**8,
        "why": "measured",
        "split": split,
        "recommended": False,
        **more,
    }


def tuned() -> dict[str, Any]:
    nothing = {"units_per_second": None, "peak": None, "split": None}
    trials = [
        trial(8, 1000.0),
        trial(16, 1200.0, recommended=True),
        trial(16, 900.0, checkpointing=True),
        trial(64, 0.0, why="predicted not to fit", **nothing),
    ]
    points = [
        {
            "ranks": n,
            "units_per_second": 1200.0 * n * 0.9 ** (n > 1),
            "units_per_second_overlapped": 1200.0 * n,
            "seconds": 1.0,
        }
        for n in (1, 2, 8)
    ]
    return {
        "subject": "gpt",
        "unit": "tokens",
        "batch_size": 64,
        "device": "cpu",
        "settings": {"batch_size": 64, "micro_batch": 16, "precision": "full"},
        "advice": ["micro-batch 16, full precision", "20% faster than micro-batch 8."],
        "bottleneck": {"kind": "compute", "evidence": ["94% of a window is forward and backward"]},
        "accumulation": ["More micro-batches would not change the time per sample."],
        "trials": trials,
        "memory": plan(),
        "ranks": {"said": "A model: 10 MB are reduced once per window.", "points": points},
    }


def benchmark() -> dict[str, Any]:
    rows = {"small": {"bare_ms": 2.5, "ours_ms": 2.6, "ratio": 1.04}, "large <1>": {"bare_ms": 25}}
    return {"results": rows, "torch": "2.13.0", "date": "2026-01-01"}


def write_all(folder: Path) -> list[Path]:
    """One of everything; the first run has its verdict, plan and tuning beside it."""
    one = write_run(folder / "one", memory=2**30)
    two = write_run(folder / "two", lr=0.5)
    (one / "verify.json").write_text(json.dumps(verdict()))
    (one / "plan.json").write_text(json.dumps(plan()))
    (one / "tune.json").write_text(json.dumps(tuned()))
    (folder / "wrong.json").write_text(json.dumps(verdict(same=False)))
    (folder / "loop.json").write_text(json.dumps(loop_verdict()))
    (folder / "bench.json").write_text(json.dumps(benchmark()))
    return [one, two, *(folder / f"{name}.json" for name in ("wrong", "loop", "bench"))]
