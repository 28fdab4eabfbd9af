"""The proof again with twice the digits, where memory allows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from wholebatch.verification.batch_reading import Reading
from wholebatch.verification.judge import gradients
from wholebatch.verification.run_distance import Comparison, Vectors, roundoff
from wholebatch.verification.undivided_batch import ranks
from wholebatch.verification.window_runs import Bench, in_other_orders, wide_batch

__all__ = ["Wide", "free_memory", "in_float64", "uneven"]


@dataclass(frozen=True)
class Wide:
    """The comparison in float64, and the undivided batch's gradient if it was the same batch."""

    comparison: Comparison
    reference: Vectors | None


def in_float64(
    bench: Bench, batch: Any, micro_batch: Any, reading: Reading
) -> tuple[Wide | None, str | None]:
    """All runs in float64, on as many samples as fit; else None, and a note that says why."""
    if bench.numbers.precision == "full" and bench.numbers.unit(bench.model) <= roundoff(
        torch.float64
    ):
        return None, None  # it is float64 already
    if bench.is_sharded or ranks() > 1:
        return None, "not run in float64: a model on several ranks is not copied"
    try:
        return _runs(bench, wide_batch(batch), micro_batch, reading)
    except torch.OutOfMemoryError:
        why = "there is not enough memory"
    except Exception as error:  # what a module or loss says to being copied, or to float64
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    finally:
        free_memory()
    return None, f"not run in float64: {why}"


def _runs(bench: Bench, batch: Any, micro_batch: Any, reading: Reading) -> tuple[Wide, str | None]:
    wide = bench.in_float64()
    wide.silences = bench.silences
    samples = size = reading.size(batch)
    while True:
        try:
            part, of_part = reading.first(batch, size)
            whole = wide.whole(part)
            break
        except torch.OutOfMemoryError:
            if size <= 2:
                raise
        size = math.ceil(size / 2)
        wide.begin()
        free_memory()
    if size < samples and isinstance(micro_batch, int) and micro_batch >= size:
        micro_batch = uneven(size)
    ours = wide.accumulated(part, micro_batch, of_part)
    others = in_other_orders(wide, part, of_part)
    comparison = gradients("gradient in float64", wide, ours, whole, others)
    if size < samples:
        return Wide(comparison, None), f"in float64 on {size} of {samples} samples: more do not fit"
    return Wide(comparison, whole.gradients), None


def uneven(samples: int) -> int:
    """About four micro-batches, of which the last is smaller."""
    size = math.ceil(samples / 4)
    return size if samples % size or size == 1 else max(1, size - 1)


def free_memory() -> None:
    """Give cached device memory back, so that the next try finds it in one piece."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
