"""`micro_batch="auto"` beside the largest micro-batch that fits, and predicted beside real peaks.

    python benchmarks/gpu_auto.py [NAME ...]     # on CUDA; writes memory.md

Each model runs in a process of its own, under a hard limit of its allocator, for at most 60
seconds. "Largest that fits" is searched in steps of 4% above the chosen size, each with a window of
two micro-batches, until three sizes in a row fail. The page goes to $OUT if that is set, else to
docs/benchmarks.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from architecture_models import MODELS as ARCHITECTURES
from architecture_models import REFERENCES

import wholebatch as wb
from wholebatch.memory import predict_peak
from wholebatch.memory.plain_window import PlainWindow

GIB = 2**30
MODELS = {"llama 12x768 micro 4": 10.0, "vit": 6.0, "convnext": 6.0, "bert": 4.0}
"""Models of `architecture_models.py`, and the GiB of memory that each gets."""


SECONDS = 60
"""The most time that a model gets, in its own process."""


def measured(name: str, most: int = 256) -> dict[str, Any]:
    """Return the chosen size, the largest that runs, and a predicted and a real peak."""
    case = next(one for one in (*ARCHITECTURES, *REFERENCES) if one.name == name)
    model, loss_of = case.build(case.size).cuda(), case.loss
    optimizer = torch.optim.AdamW(model.parameters())
    budget = int(MODELS[name] * GIB)
    batch = case.batch(case.size, most)
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=loss_of,
        precision="bf16",
        memory=budget,
        execute="eager",
    )
    began = time.perf_counter()
    print(train.choose(batch), file=sys.stderr, flush=True)
    seconds = time.perf_counter() - began
    chosen = train.micro_batch_size
    assert chosen is not None
    train.step({key: value[: 2 * chosen] for key, value in batch.items()})
    recoveries = train.recoveries
    print(f"{recoveries} recoveries in the first window", file=sys.stderr, flush=True)

    def peak(size: int) -> int | None:
        """Return the peak of a window in the middle of a run; None if it does not fit."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        micro = {key: value[:size].cuda() for key, value in batch.items()}
        try:
            PlainWindow(model, loss_of, optimizer=optimizer, precision="bf16").run([micro, micro])
            return torch.cuda.max_memory_allocated()
        except torch.OutOfMemoryError:
            return None
        finally:
            optimizer.zero_grad(set_to_none=True)
            torch.clear_autocast_cache()

    largest, step, failures = chosen, max(1, chosen // 25), 0
    size = chosen
    while failures < 3 and size < most:
        size += step
        if peak(size) is None:
            failures += 1
        else:
            largest, failures = size, 0
        print(f"{size}: largest so far {largest}", file=sys.stderr, flush=True)
    few = {key: value[: chosen // 2] for key, value in batch.items()}
    told = predict_peak(model, loss_of, few, optimizer=optimizer, precision="bf16")
    return {
        "chosen": chosen,
        "largest": largest,
        "recoveries": recoveries,
        "seconds": seconds,
        "predicted": told.peak / GIB,
        "real": (peak(chosen // 2) or 0) / GIB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MODELS))
    parser.add_argument("--one", help="measure this model alone, and print it as JSON")
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measured(options.one)))
        return
    page = [
        "# Memory: measured, chosen and predicted",
        "",
        f"Written by `benchmarks/gpu_auto.py` on {date.today()}: {torch.cuda.get_device_name()}, "
        f"torch {torch.__version__}. bf16, AdamW, eager. The prediction is for half the chosen "
        "size.",
        "",
        "| model | budget, GiB | auto | largest that fits | share | recoveries | seconds |"
        " predicted, GiB | real, GiB | off |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in options.names:
        again = [sys.executable, __file__, "--one", name]
        try:
            ran = subprocess.run(again, stdout=subprocess.PIPE, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            ran = None
        if ran is None or ran.returncode:
            why = f"took more than {SECONDS} seconds" if ran is None else "failed"
            page.append(f"| {name} | {why} |")
        else:
            row = json.loads(ran.stdout.splitlines()[-1])
            off = row["predicted"] / row["real"] - 1 if row["real"] else float("nan")
            page.append(
                f"| {name} | {MODELS[name]:.0f} | {row['chosen']} | {row['largest']} | "
                f"{row['chosen'] / row['largest']:.0%} | {row['recoveries']} | "
                f"{row['seconds']:.0f} | {row['predicted']:.2f} | {row['real']:.2f} | {off:+.1%} |"
            )
        print(page[-1], flush=True)
    folder = Path(os.environ.get("OUT", Path(__file__).parents[1] / "docs/benchmarks"))
    (folder / "memory.md").write_text("\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
