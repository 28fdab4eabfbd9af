"""Packed micro-batches beside padded ones that are sorted by length, on a GPU.

    python benchmarks/gpu_packing.py            # on CUDA; a few minutes; packing.json to $OUT
    python benchmarks/gpu_packing.py --budgets 1024 --warm 20
    python benchmarks/gpu_packing.py --small    # a look at the code path, anywhere

A Llama of Transformers (12 x 768, bf16) on texts whose lengths are drawn as in
a chat data set (log-normal, median 32), new ones in every window, as in training. Sorted
and trimmed, nearly every micro-batch has a shape of its own; packed, they have one shape, and run
as one recorded graph. All ways make the same update within the same budget of tokens, in turn in
one process; a figure is real tokens per second, the median over windows.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wholebatch as wb

MEDIAN, SIGMA, LONGEST = 32, 0.7, 256
WANTED = 1.5
LARGE: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
}
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
Batch = dict[str, Tensor]


def window(samples: int, vocabulary: int, seed: int) -> Batch:
    """Texts of drawn lengths, padded to the longest."""
    draw = torch.Generator().manual_seed(seed)
    lengths = (MEDIAN * (SIGMA * torch.randn(samples, generator=draw)).exp()).round().long()
    lengths = lengths.clamp(2, LONGEST)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.randint(1, vocabulary, mask.shape, generator=draw).where(mask, 0)
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": ids.masked_fill(~mask, -100),
    }


def trainer(sizes: dict[str, Any], device: str, micro_batch: Any, execute: Any) -> wb.WholeBatch:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, use_cache=False, max_position_embeddings=LONGEST)
    with torch.device(device):
        model: Any = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    return wb.WholeBatch(
        model.train(),
        optimizer,
        loss=wb.causal_lm,
        micro_batch=micro_batch,
        precision="bf16" if device == "cuda" else "full",
        execute=execute,
    )


def measured(
    train: wb.WholeBatch, samples: int, vocabulary: int, device: str, limits: tuple[float, float]
) -> dict[str, Any]:
    """Warm up within the first limit of seconds, then time windows within the second."""
    losses: list[float] = []
    seed = 0
    done: list[tuple[float, int, int]] = []  # seconds, real tokens, micro-batches
    for limit, most in zip(limits, (20, 20), strict=True):
        began, done = time.perf_counter(), []
        while len(done) < most and (len(done) < 2 or time.perf_counter() - began < limit):
            batch = window(samples, vocabulary, seed)
            seed += 1
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            step = train.step(batch)
            if device == "cuda":
                torch.cuda.synchronize()
            took = time.perf_counter() - start
            done.append((took, int(batch["attention_mask"].sum()), step.micro_batches))
            losses.append(step.loss)
    return {
        # A median: a graph that is compiled in one of the windows is compiled once.
        "real_tokens_per_second": statistics.median(one[1] / one[0] for one in done),
        "all_windows_per_second": sum(one[1] for one in done) / sum(one[0] for one in done),
        "milliseconds_per_window": 1000 * statistics.median(one[0] for one in done),
        "micro_batches": done[-1][2],
        "windows": len(done),
        "mode": train._runner.executor.mode,
        "first_losses": losses[:2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--budgets", type=int, nargs="+", help="tokens of a micro-batch")
    parser.add_argument("--warm", type=float, default=60.0, help="seconds to warm up a graph")
    parser.add_argument("--ways", nargs="+", help="the ways to measure; all by default")
    options = parser.parse_args()
    small = options.small
    device, sizes = ("cpu", SMALL) if small else ("cuda", LARGE)
    budgets = {1024: 64} if small else {1024: 128, 8192: 1024}
    budgets = {one: budgets[one] for one in options.budgets or budgets}
    graph = "eager" if small else "graph"
    found: dict[str, Any] = {}
    for budget, samples in budgets.items():
        ways: dict[str, tuple[Any, str]] = {
            "sorted, eager": (wb.tokens(budget), "eager"),
            "sorted": (wb.tokens(budget), "auto"),
            "sorted, multiple=64": (wb.tokens(budget, multiple=64), graph),
            "packed, eager": (wb.tokens(budget, pack=LONGEST), "eager"),
            "packed": (wb.tokens(budget, pack=LONGEST), graph),
        }
        rows: dict[str, Any] = {}
        for name in options.ways or ways:
            micro_batch, execute = ways[name]
            try:
                train = trainer(sizes, device, micro_batch, execute)
                warm = 1.0 if small else 5.0 if execute == "eager" else options.warm
                limits = (warm, 1.0 if small else 8.0)
                rows[name] = measured(train, samples, sizes["vocab_size"], device, limits)
                del train
            except Exception as error:  # one way that fails must not cost the others
                rows[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            print(budget, name, json.dumps(rows[name]), flush=True)
        speed = {name: row.get("real_tokens_per_second", 0.0) for name, row in rows.items()}
        padded = max((speed[name] for name in speed if name.startswith("sorted")), default=0.0)
        rows["ratio"] = speed.get("packed", 0.0) / padded if padded else None
        print(f"budget {budget}: packed over the best of sorted: {rows['ratio']} (want {WANTED})")
        found[str(budget)] = rows
    if folder := os.environ.get("OUT"):
        Path(folder, "packing.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
