"""Predicted peak memory beside the measured one, and the chosen micro-batch beside the largest.

    python benchmarks/gpu_memory.py [predict] [choose] [--models NAME ...] [--out DIR] [--budget S]
    python benchmarks/gpu_memory.py --tables          # memory.md from memory.json again

Every model runs in a process of its own, all of them side by side: what is measured is what a
process itself has allocated. Writes memory.json and memory.md. On a machine without CUDA, `predict`
prints what is predicted for a GPU that is not there.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from memory_models import MODELS, Model, loss
from memory_table import page
from torch import Tensor, nn

from wholebatch.memory.activation_checkpointing import repeated_blocks, with_checkpoints
from wholebatch.memory.plain_window import PlainWindow
from wholebatch.memory.predict import predict_peak
from wholebatch.memory.trial_step import calibrate, choose_on_device, try_out

GIB = 2**30
HAS_CUDA = torch.cuda.is_available()
ROOT = Path(__file__).resolve().parents[1]
MARK = "ROW "


def build(one: Model, *, checkpointed: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.device("cuda" if HAS_CUDA else "meta"):
        model = one.make()
    if checkpointed:
        with_checkpoints(model)
    return model, torch.optim.AdamW(model.parameters())


def free() -> None:
    gc.collect()
    if HAS_CUDA:
        torch.cuda.empty_cache()


def measured(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], precision: str
) -> tuple[int, int]:
    """Allocated and reserved bytes at the peak of a window of two micro-batches, state there."""
    free()
    window = PlainWindow(model, loss, optimizer=optimizer, precision=precision)
    micro = {name: tensor.cuda() for name, tensor in batch.items()}
    if not optimizer.state:
        window.run([micro])
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    window.run([micro, micro])
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def told(row: dict[str, Any]) -> None:
    print(MARK + json.dumps(row), flush=True)


def predict_all(name: str) -> None:
    """At every size, with and without checkpointing, full and bf16: predicted and measured."""
    one = MODELS[name]
    for checkpointed in (False, True):
        for precision in ("full", "bf16"):
            model, optimizer = build(one, checkpointed=False)
            if checkpointed:
                if not repeated_blocks(model):
                    continue
                with_checkpoints(model)
            for size in one.sizes:
                batch = one.batch(size)
                predicted = predict_peak(
                    model, loss, batch, optimizer=optimizer, precision=precision, device="cuda"
                )
                row: dict[str, Any] = {
                    "what": "predict",
                    "model": name,
                    "kind": one.kind,
                    "size": size,
                    "precision": precision,
                    "checkpointed": checkpointed,
                    "predicted": predicted.peak,
                    "seconds": round(predicted.seconds, 2),
                }
                if HAS_CUDA:
                    row["corrected"] = predicted.peak
                    if size > 1:  # as the library does it before it chooses
                        correct = calibrate(
                            model,
                            loss,
                            batch,
                            precision=precision,
                            samples=(max(1, size // 4), max(1, size // 2)),
                        )
                        row["corrected"] = correct(size, predicted.peak)
                    row["measured"], row["reserved"] = measured(model, optimizer, batch, precision)
                told(row)
            del model, optimizer
            free()


def choose_one(name: str) -> None:
    """The chosen micro-batch beside the largest that runs under a real limit of memory."""
    one = MODELS[name]
    precision, checkpointed = one.chosen
    limit = int(one.limit * GIB)
    total = torch.cuda.get_device_properties(0).total_memory
    model, optimizer = build(one, checkpointed=checkpointed)
    free()
    torch.cuda.set_per_process_memory_fraction(limit / total)
    began = time.perf_counter()
    batch = one.batch(2)
    options: dict[str, Any] = {"optimizer": optimizer, "precision": precision}
    choice = choose_on_device(model, loss, batch, budget=limit, most=4096, **options)
    seconds = time.perf_counter() - began
    choice = try_out(model, loss, batch, choice, most=4096, **options)
    chosen = choice.micro_batch
    row: dict[str, Any] = {
        "what": "choose",
        "model": name,
        "precision": precision,
        "checkpointed": checkpointed,
        "limit": limit,
        "chosen": chosen,
        "predicted": choice.prediction.peak,
        "failed_trials": len(choice.failed),
        "seconds": round(seconds, 1),
        "predictions": len(choice.tried),
    }

    def runs(size: int) -> bool:
        try:
            measured(model, optimizer, one.batch(size), precision)
            return True
        except torch.OutOfMemoryError:
            return False
        finally:
            optimizer.zero_grad(set_to_none=True)
            torch.clear_autocast_cache()
            free()

    row["ran"] = runs(chosen)
    # Up to here memory must not have run out, not even in a trial step. (The allocator's own count
    # is no measure: cuDNN asks for workspaces, is refused, and takes another algorithm.)
    row["out_of_memory"] = len(choice.failed) + int(not row["ran"])
    row["tried"] = sorted(choice.failed)
    told({**row, "largest": None})
    # Every size from there on (by one in a hundred, for large ones) until three in a row fail.
    step = max(1, chosen // 100)
    size, largest, failures = chosen, chosen if row["ran"] else 0, 0
    while failures < 3 and size < 2 * chosen + 8:
        size += step
        if runs(size):
            largest, failures = size, 0
        else:
            failures += 1
    if not row["ran"]:
        size = chosen
        while size > 1 and not runs(size := size - step):
            pass
        largest = size
    told({**row, "largest": largest, "step": step})
    torch.cuda.set_per_process_memory_fraction(1.0)


def gather(names: list[str], what: list[str], budget: float) -> list[dict[str, Any]]:
    """One process for each model; what they have said when the time is over."""
    began = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    here = [sys.executable, str(Path(__file__).resolve()), *what, "--alone", "--models"]
    running = {
        name: subprocess.Popen(
            [*here, name],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    }
    rows: list[dict[str, Any]] = []
    for name, process in running.items():
        left = max(0.5, budget - (time.perf_counter() - began))
        try:
            out, problem = process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            process.kill()
            out, problem = process.communicate()
            problem = f"ended after {budget:.0f} s\n"
        found = [json.loads(line[len(MARK) :]) for line in out.splitlines() if MARK in line]
        rows += found
        ended = time.perf_counter() - began
        print(f"{name}: {len(found)} rows, {ended:.0f} s", flush=True)
        if process.returncode:
            print(f"{name}: {problem.strip()[-600:]}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=["predict", "choose"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tables", action="store_true", help="memory.md from memory.json again")
    options = parser.parse_args()
    stored = options.out / "memory.json"
    if options.alone or not (HAS_CUDA or options.tables):
        for name in options.models:
            if "choose" in options.what and HAS_CUDA:
                choose_one(name)
            if "predict" in options.what:
                predict_all(name)
        return
    if options.tables:
        found = json.loads(stored.read_text())
    else:
        found = {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(),
            "rows": gather(options.models, options.what, options.budget),
        }
        options.out.mkdir(parents=True, exist_ok=True)
        stored.write_text(json.dumps(found, indent=1) + "\n")
    text = page(found)
    (options.out / "memory.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
