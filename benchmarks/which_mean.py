"""How far off the usual loop is, by loss: the tables of docs/which-mean.md.

    python benchmarks/which_mean.py           # print both tables
    python benchmarks/which_mean.py --page    # write them into the page

The first is the gradient of one window in float64: 12 completions (9 pairs) in micro-batches of
1, 2, 3 and 6 (2, 1 and 6), beside the undivided batch. The usual loop averages the means of its
micro-batches. The second is TRL's own update with four batches beside that with one, in float32.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "CI": "1"}

import torch  # noqa: E402
from pages import written  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import wholebatch as wb  # noqa: E402
from tests.losses.preferences import OURS, PLAIN, pairs  # noqa: E402
from tests.losses.problem import Batch, Policy, batch, ours, undivided  # noqa: E402
from tests.support import Seen, distance, pieces, sgd  # noqa: E402

PAGE = ROOT / "docs" / "which-mean.md"
SIZES = {12: (1, 2, 3, 6), 9: (2, 1, 6)}


@dataclass(frozen=True)
class Row:
    """A loss by name: its mean, what trainers do with it, and what to write."""

    loss: str
    over: str
    others: str
    write: str
    ours: Any
    plain: Callable[[Any, Batch], Tensor]
    data: Batch


def _policy(loss: str, mean: str, over: str, others: str) -> Row:
    write = f'`wb.losses.policy_loss(…, mean="{mean}")`'
    return Row(loss, over, others, write, ours(mean), undivided(mean), batch())


def _preference(loss: str, name: str, over: str, others: str, write: str) -> Row:
    return Row(loss, over, others, f"`{write}`", OURS[name], PLAIN[name], pairs())


def rows() -> list[Row]:
    """The losses of the table."""
    averaged = "per micro-batch"
    return [
        _policy(
            "DAPO, PPO",
            "tokens",
            "tokens of the global batch",
            "TRL dapo: the same. verl token-mean: the same if it is told the count; else "
            "(and TRL bnpo) per micro-batch",
        ),
        _policy(
            "GRPO",
            "sequences",
            "sequences, each a mean over its tokens",
            f"TRL grpo, verl seq-mean-token-mean: {averaged}; right with equally many sequences",
        ),
        _policy(
            "LUSPO",
            "sequence_sums",
            "sequences, each a sum over its tokens",
            f"TRL luspo, verl seq-mean-token-sum: {averaged}",
        ),
        _policy(
            "Dr. GRPO",
            "constant",
            "sequences, each a sum ÷ a constant",
            f"TRL dr_grpo: {averaged}; verl: not divided by the sequences",
        ),
        _policy(
            "DAPO as its paper writes",
            "groups",
            "prompts, each a mean over its tokens",
            "verl and TRL: the token mean of the batch instead",
        ),
        _policy(
            "GRPO as its paper writes",
            "group_sequences",
            "prompts, each a mean over its sequences",
            f"{averaged}; right with equally large groups",
        ),
        _preference("DPO", "dpo", "pairs", f"TRL: {averaged}", "wb.losses.dpo_loss(…)"),
    ]


def gradient(model: nn.Module, total: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    both = zip(found, model.parameters(), strict=True)
    return [torch.zeros_like(p) if g is None else g for g, p in both]


def errors(row: Row) -> tuple[float, float]:
    """How far the usual loop is off, and how far wholebatch is."""
    micros = pieces(row.data, SIZES[len(next(iter(row.data.values())))])
    model = Policy()
    right = gradient(model, row.plain(model, row.data))
    usual = torch.stack([row.plain(model, micro) / len(micros) for micro in micros]).sum()
    off = distance(gradient(model, usual), right)
    optimizer = sgd(model)
    seen = Seen(model, optimizer)
    acc = wb.Accumulator(model, optimizer, steps=len(micros))
    for micro in micros:
        acc.backward(row.ours(model, micro))
    return off, distance(seen.gradients[0], right)


def means_table() -> list[str]:
    """The lines of the first table."""
    lines = [
        "| loss | is a mean over | what trainers do | the usual loop is off by | write |",
        "|---|---|---|---:|---|",
    ]
    for row in rows():
        off, ours_off = errors(row)
        assert ours_off <= 1e-12, f"{row.loss}: {ours_off}"
        cells = (row.loss, row.over, row.others, f"{off:.0%}", row.write)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


TRAINERS: list[tuple[str, str, dict[str, Any]]] = [
    ("GRPOTrainer (dapo)", "GRPO", {}),
    ("GRPOTrainer, `entropy_coef=0.5`", "GRPO", {"entropy_coef": 0.5}),
    ("GRPOTrainer, bnpo", "GRPO", {"loss_type": "bnpo"}),
    ("GRPOTrainer, grpo", "GRPO", {"loss_type": "grpo"}),
    ("GRPOTrainer, dr_grpo", "GRPO", {"loss_type": "dr_grpo"}),
    ("RLOOTrainer", "GRPO", {"rloo": True}),
]


def trainers_table() -> Iterator[str]:
    """The lines of the second table."""
    import datasets
    from trl import __version__

    from tests.integrations.trl_training import TRAINERS as MAKE
    from tests.integrations.trl_training import off, trained
    from wholebatch.integrations.transformers import exact

    datasets.disable_progress_bars()
    yield f"| TRL {__version__} | its own four batches are off by | `exact(…)` is off by |"
    yield "|---|---:|---:|"
    for title, name, options in TRAINERS:
        whole = trained(MAKE[name](lambda kind: kind, 1, **options))
        own = off(trained(MAKE[name](lambda kind: kind, 4, **options)), whole)
        through_us = off(trained(MAKE[name](exact, 4, **options)), whole)
        cells = ["< 1e-6" if one < 1e-6 else f"{one:.0%}" for one in (own, through_us)]
        yield f"| {title} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--page", action="store_true", help="write the tables into the page")
    given = parser.parse_args()
    tables = {"means": means_table(), "trainers": list(trainers_table())}
    page = PAGE.read_text(encoding="utf-8")
    for name, lines in tables.items():
        print("\n".join(lines), end="\n\n")
        page = written(page, name, lines)
    if given.page:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
