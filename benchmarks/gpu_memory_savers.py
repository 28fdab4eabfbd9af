"""What each technique does to memory and time: one GPT, one batch, one technique after the other.

    python benchmarks/gpu_memory_savers.py               # on CUDA; writes techniques.md
    python benchmarks/gpu_memory_savers.py --device cpu  # tries the file out, with a tiny model

Plain eager code, so that only the technique differs. Time is the median of five windows (forward,
backward, update), memory what the allocator reserved for them. $OUT, else docs/benchmarks, gets the
page.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import wholebatch as wb
from wholebatch.memory import with_checkpoints

WAYS: dict[str, dict[str, Any]] = {
    "fp32, 1 step (undivided)": {"steps": 1, "precision": "full"},
    "fp32, 4 steps": {"steps": 4, "precision": "full"},
    "bf16, 1 step (undivided)": {"steps": 1},
    "bf16, 4 steps": {"steps": 4},
    "bf16, 16 steps": {"steps": 16},
    "bf16, 64 steps": {"steps": 64},
    "bf16, 1 step, checkpointed": {"steps": 1, "checkpoints": True},
    "bf16, 16 steps, checkpointed": {"steps": 16, "checkpoints": True},
    "bf16, 16 steps, optimizer state on the host": {"steps": 16, "optimizer_state": "host"},
}


def measure(
    device: str,
    *,
    steps: int,
    precision: Any = "bf16",
    checkpoints: bool = False,
    optimizer_state: Any = "device",
) -> tuple[float, float]:
    """Return the milliseconds of a window and the GiB reserved for it."""
    tiny: dict[str, Any] = {
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 2,
        "n_positions": 16,
        "vocab_size": 64,
    }
    config = GPT2Config(**(tiny if device == "cpu" else {}), resid_pdrop=0.0, attn_pdrop=0.0)
    torch.manual_seed(0)
    built: Any = GPT2LMHeadModel(config)
    model = built.to(device)
    if checkpoints:
        with_checkpoints(model)
    train = wb.WholeBatch(
        model,
        torch.optim.AdamW(model.parameters(), fused=True),
        loss=wb.causal_lm,
        micro_batch=64 // steps,
        precision=precision,
        execute="eager",
        audit=False,
        memory=wb.Memory(optimizer_state=optimizer_state),
    )
    batch = {"input_ids": torch.randint(0, config.vocab_size, (64, config.n_positions))}
    seconds = []
    for window in range(7):
        if window == 2 and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        train.step(batch)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    reserved = torch.cuda.max_memory_reserved() if device == "cuda" else 0
    return 1000 * statistics.median(seconds[2:]), reserved / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    lines = [
        "# Techniques: memory and time",
        "",
        f"`python benchmarks/gpu_memory_savers.py`, {date.today().isoformat()}, {where}, torch "
        f"{torch.__version__}: GPT-2 with 124 M parameters, 64 sequences of 1,024 tokens, fused "
        "AdamW, eager code.",
        "",
        "| technique | ms | GiB | tokens/s |",
        "|---|---:|---:|---:|",
    ]
    for name, way in WAYS.items():
        try:
            ms, gib = measure(device, **way)
        except torch.OutOfMemoryError:
            lines.append(f"| {name} | out of memory | | |")
        else:
            rate = 64 * (16 if device == "cpu" else 1024) / ms * 1000
            lines.append(f"| {name} | {ms:.0f} | {gib:.1f} | {rate:,.0f} |")
        print(lines[-1], flush=True)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    out = Path(os.environ.get("OUT") or Path(__file__).parents[1] / "docs/benchmarks")
    if device == "cuda":
        (out / "techniques.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
