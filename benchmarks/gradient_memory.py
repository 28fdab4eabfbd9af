"""Which part of memory each technique removes: one GPT, one batch, by what the bytes are for.

    python benchmarks/gradient_memory.py           # prints the table of docs/memory.md
    python benchmarks/gradient_memory.py --page    # and writes it there

Every row trains two windows of the same batch on a CPU and counts, in the second, the bytes of
every tensor that is alive at the peak. State that waits "on the host" does not count, and neither
does the memory inside kernels.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from pages import written
from transformers import GPT2Config, GPT2LMHeadModel

import wholebatch as wb
from wholebatch.memory import MemoryMeter, with_checkpoints

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
SAMPLES, TOKENS = 8, 64
PARTS = ("parameters", "gradients", "optimizer state", "activations", "temporaries")
ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed precision": {"precision": "bf16"},
    "checkpointing": {"checkpoints": True},
    "accumulation": {"micro_batch": 1},
    "accumulation, optimizer state on the host": {
        "micro_batch": 1,
        "memory": wb.Memory(optimizer_state="host"),
    },
    "one sample, plain": {"samples": 1},
}


def measured(
    *, checkpoints: bool = False, samples: int = SAMPLES, **options: Any
) -> dict[str, int]:
    """Return the bytes alive at the peak by category; the batch itself is left out."""
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(
        GPT2Config(n_layer=4, n_embd=128, n_head=4, n_positions=TOKENS, vocab_size=512)
    )
    if checkpoints:
        with_checkpoints(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=wb.causal_lm,
        execute="eager",
        audit=False,
        **{"micro_batch": samples, **options},
    )
    batch = {"input_ids": torch.randint(0, 512, (samples, TOKENS))}
    train.step(batch)
    with MemoryMeter(model=model, optimizer=optimizer) as meter:
        train.step(batch)
    parts = {name: int(meter.peak_by_category.get(name, 0)) for name in PARTS}
    if "memory" in options:  # The meter counts the state that waits on the host.
        states = optimizer.state.values()
        waiting = sum(value.nbytes for state in states for value in state.values())
        parts["optimizer state"] = max(0, parts["optimizer state"] - waiting)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", action="store_true", help=f"write the table into {PAGE.name}")
    options = parser.parse_args()
    lines = [f"| | {' | '.join(PARTS)} | together |", "|---|" + "---:|" * (len(PARTS) + 1)]
    for name, row in ROWS.items():
        parts = measured(**row)
        sizes = [*parts.values(), sum(parts.values())]
        lines.append(f"| {name} | {' | '.join(f'{size / 2**20:,.1f}' for size in sizes)} |")
        print(lines[-1], flush=True)
    if options.page:
        page = written(PAGE.read_text(encoding="utf-8"), "gradient_memory", lines)
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
