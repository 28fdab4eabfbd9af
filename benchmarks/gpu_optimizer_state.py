"""Time and memory of a window with the optimizer's state on the device and on the host.

    python benchmarks/gpu_optimizer_state.py                     # on the GPU
    python benchmarks/gpu_optimizer_state.py --model gpt-124m

Prints one line per row: median milliseconds per window, peak of device memory, and the largest
difference of the parameters from the plain window after all updates.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import default_collate

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from speed.models import CASES, summed  # noqa: E402

import wholebatch as wb  # noqa: E402


def run(
    name: str, place: str, execute: str, micro_batch: int, windows: int
) -> tuple[float, float, torch.Tensor]:
    """Return milliseconds per window, GiB at the peak, and the parameters in the end."""
    case = CASES[name]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=summed,
        micro_batch=micro_batch,
        precision="bf16",
        execute=execute,  # type: ignore[arg-type]
        memory=wb.Memory(optimizer_state=place),  # type: ignore[arg-type]
        audit=False,
    )
    batch = default_collate([case.sample(index) for index in range(case.window)])
    batch = {key: value.cuda() for key, value in batch.items()}
    for _ in range(4):
        train.step(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(windows):
        began = time.perf_counter()
        train.step(batch)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**30
    parameters = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    del train, model, optimizer
    gc.collect()
    torch.cuda.empty_cache()
    return 1e3 * statistics.median(seconds), peak, parameters


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="gpt-1.3b", choices=sorted(CASES))
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--execute", nargs="+", default=["eager", "graph"])
    options = parser.parse_args()
    for execute in options.execute:
        plain = None
        for place in ("device", "host"):
            ms, peak, found = run(
                options.model, place, execute, options.micro_batch, options.windows
            )
            plain = found if plain is None else plain
            apart = float((found - plain).abs().max())
            print(
                f"{options.model} {execute} optimizer_state={place}: {ms:.1f} ms, "
                f"{peak:.2f} GiB, parameters differ by {apart:.1e}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
