"""How far each way of accumulating gradients is from the update of the undivided batch.

    python benchmarks/exactness.py

A byte-level language model in float64 on this repository's LICENSE, plain SGD with a learning rate
of 1, so that the update is the very gradient that the optimizer saw. The error is the relative L2
distance of an update to that of the undivided batch, the largest over the windows of an epoch.
Writes docs/benchmarks/exactness.md and .json; fails if wholebatch's
own error is above 1e-12.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1e-12
IGNORE = -100

Micro = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One epoch: the lengths of its samples, cut into micro-batches, `steps` of them per window."""

    name: str
    lengths: tuple[int, ...]
    micro_batch: int = 8
    steps: int = 4
    clip_norm: float | None = None
    step_at_end: bool = True


@dataclass(frozen=True)
class Row:
    """The errors of one case: wholebatch's two ways in, the usual loop, and the rounding floor."""

    case: str
    accumulator: float
    whole_batch: float
    usual_loop: float
    usual_updates: str
    permuted: float


def spread(count: int) -> tuple[int, ...]:
    """Lengths between 4 and 128, most of them short, as in real text."""
    drawn = torch.empty(count).log_normal_(3.0, 0.9, generator=torch.Generator().manual_seed(1))
    return tuple(int(length) for length in drawn.clamp(4, 128))


CASES = (
    Case("equal micro-batches", (48,) * 32),
    Case("the last micro-batch has 1 sample, not 8", (48,) * 25),
    Case("different numbers of tokens", spread(32)),
    Case("different numbers of tokens, clipped", spread(32), clip_norm=0.1),
    Case("short last window: 2 of 4", (48,) * 48),
    Case("short last window, stepped on `% 4` only", (48,) * 48, step_at_end=False),
)


class ByteModel(nn.Module):
    """A small recurrent language model over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.recur = nn.GRU(32, 64, batch_first=True)
        self.read = nn.Linear(64, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.recur(self.embed(tokens))
        logits: Tensor = self.read(hidden)
        return logits


def fresh() -> tuple[ByteModel, torch.optim.SGD]:
    torch.manual_seed(0)
    model = ByteModel().double()
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def samples_of(case: Case) -> Micro:
    """All samples of the epoch: stretches of the LICENSE, padded on the right."""
    text = torch.frombuffer(bytearray((ROOT / "LICENSE").read_bytes()), dtype=torch.uint8).long()
    longest = max(case.lengths)
    starts = torch.linspace(0, len(text) - longest - 2, len(case.lengths)).long()
    tokens = torch.zeros(len(case.lengths), longest, dtype=torch.long)
    labels = torch.full_like(tokens, IGNORE)
    for row, (start, length) in enumerate(zip(starts.tolist(), case.lengths, strict=True)):
        tokens[row, :length] = text[start : start + length]
        labels[row, :length] = text[start + 1 : start + length + 1]
    return {"tokens": tokens, "labels": labels}


def cut(samples: Micro, size: int) -> list[Micro]:
    names, parts = list(samples), [tensor.split(size) for tensor in samples.values()]
    return [dict(zip(names, tensors, strict=True)) for tensors in zip(*parts, strict=True)]


def updates_of(train: Callable[[ByteModel, torch.optim.SGD], None]) -> list[Tensor]:
    """The updates that `train` makes to a fresh model, one flat vector each."""
    model, optimizer = fresh()
    places = [nn.utils.parameters_to_vector(model.parameters()).detach()]

    def keep(*_: object) -> None:
        places.append(nn.utils.parameters_to_vector(model.parameters()).detach())

    optimizer.register_step_post_hook(keep)
    train(model, optimizer)
    return [after - before for before, after in pairwise(places)]


def undivided(batches: list[Micro], case: Case) -> list[Tensor]:
    def train(model: ByteModel, optimizer: torch.optim.SGD) -> None:
        for batch in batches:
            optimizer.zero_grad()
            logits = model(batch["tokens"]).flatten(0, 1)
            functional.cross_entropy(logits, batch["labels"].flatten()).backward()
            if case.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
            optimizer.step()

    return updates_of(train)


def usual_loop(loader: list[Micro], case: Case) -> list[Tensor]:
    """The loop found in most training scripts: the mean loss, divided by the number of steps."""

    def train(model: ByteModel, optimizer: torch.optim.SGD) -> None:
        for index, micro in enumerate(loader):
            logits = model(micro["tokens"]).flatten(0, 1)
            loss = functional.cross_entropy(logits, micro["labels"].flatten()) / case.steps
            loss.backward()
            last = case.step_at_end and index + 1 == len(loader)
            if (index + 1) % case.steps == 0 or last:
                if case.clip_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
                optimizer.step()
                optimizer.zero_grad()

    return updates_of(train)


def accumulator(loader: list[Micro], case: Case) -> list[Tensor]:
    def train(model: ByteModel, optimizer: torch.optim.SGD) -> None:
        acc = wb.Accumulator(model, optimizer, steps=case.steps, clip_norm=case.clip_norm)
        for micro in acc.over(loader):
            loss = wb.cross_entropy(model(micro["tokens"]), micro["labels"], ignore_index=IGNORE)
            acc.backward(loss.total, units=loss.units)

    return updates_of(train)


def whole_batch(batches: list[Micro], case: Case) -> list[Tensor]:
    def loss(model: nn.Module, micro: Micro) -> wb.Loss:
        return wb.cross_entropy(model(micro["tokens"]), micro["labels"], ignore_index=IGNORE)

    def train(model: ByteModel, optimizer: torch.optim.SGD) -> None:
        engine = wb.WholeBatch(
            model, optimizer, loss=loss, micro_batch=case.micro_batch, clip_norm=case.clip_norm
        )
        for batch in batches:
            engine.step(batch)

    return updates_of(train)


def error(updates: list[Tensor], reference: list[Tensor]) -> float:
    """The largest relative L2 error of a window's update; an update never made counts as zero."""
    made = updates + [torch.zeros_like(reference[0])] * (len(reference) - len(updates))
    return max(
        float((update - wanted).norm() / wanted.norm())
        for update, wanted in zip(made, reference, strict=True)
    )


def measure(case: Case) -> Row:
    samples = samples_of(case)
    loader = cut(samples, case.micro_batch)
    batches = cut(samples, case.micro_batch * case.steps)
    reference = undivided(batches, case)
    permuted = [{name: tensor.flip(0) for name, tensor in batch.items()} for batch in batches]
    usual = usual_loop(loader, case)
    return Row(
        case=case.name,
        accumulator=error(accumulator(loader, case), reference),
        whole_batch=error(whole_batch(batches, case), reference),
        usual_loop=error(usual, reference),
        usual_updates=f"{len(usual)} of {len(reference)} updates",
        permuted=error(undivided(permuted, case), reference),
    )


def shown(value: float) -> str:
    return (
        f"{value:.0%}"
        if value >= 0.01
        else f"{value:.0e}".replace("e-0", "e-").replace("0e+00", "0")
    )


def table(rows: list[Row]) -> str:
    lines = [
        "| one window of | usual loop, `loss / steps` | `wb.Accumulator` | `wb.WholeBatch` "
        "| the whole batch, samples in another order |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        usual = shown(row.usual_loop)
        made, _, wanted, _ = row.usual_updates.split()
        if made != wanted:
            usual = f"no update ({usual})"
        lines.append(
            f"| {row.case} | {usual} | {shown(row.accumulator)} "
            f"| {shown(row.whole_batch)} | {shown(row.permuted)} |"
        )
    return "\n".join(lines)


def write(rows: list[Row]) -> None:
    facts = f"torch {torch.__version__}, float64, {date.today().isoformat()}"
    folder = ROOT / "docs" / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    explained = " ".join((__doc__ or "").split("\n\n")[2].split("\nWrites")[0].split())
    page = ["# Exactness", "", f"Written by `benchmarks/exactness.py` ({facts}).", "", explained]
    page += ["", table(rows), ""]
    (folder / "exactness.md").write_text("\n".join(page), encoding="utf-8")
    record = {"torch": torch.__version__, "rows": [asdict(row) for row in rows]}
    (folder / "exactness.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    rows = [measure(case) for case in CASES]
    print(table(rows))
    worst = max(max(row.accumulator, row.whole_batch) for row in rows)
    if not worst <= LIMIT:
        print(f"wholebatch is {worst:.1e} off; at most {LIMIT:.0e} is allowed", file=sys.stderr)
        return 1
    write(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
