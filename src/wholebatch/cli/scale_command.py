"""`wholebatch scale`: batch arithmetic on any number of ranks, and learning-rate rules."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from wholebatch.cli import batch_scaling as scaling
from wholebatch.cli.command_options import (
    choice,
    command,
    count_of,
    option,
    positive_number,
    switch,
    whole_number,
    with_commas,
)
from wholebatch.cli.report.terminal_output import console_of, plain_table, say
from wholebatch.cli.run_settings import like_train
from wholebatch.errors import OptionError

_FOLLOWS = "Learning rate and warm-up"
_follower = partial(option, panel=_FOLLOWS)
_COUNT = whole_number()
_SOURCE = {
    "linear": "Goyal et al. 2017, SGD",
    "sqrt": "Krizhevsky 2014; Malladi et al. 2022, Adam",
    "none": "unchanged",
}


@dataclass(frozen=True)
class ScaleOptions:
    """The options of `wholebatch scale`."""

    batch_size: int | None = like_train("batch_size")
    micro_batch: int | None = option(
        None, "N", "Samples per micro-batch, on one rank.", check=_COUNT
    )
    steps: int | None = option(None, "N", "Micro-batches per update, on one rank.", check=_COUNT)
    ranks: list[int] | None = option(
        None,
        "N,N,...",
        "Number of ranks (GPUs). Default: 1,2,4,8; computed if all others are given.",
        typed=str | None,
        check=with_commas(count_of, "numbers of ranks, such as 8 or 1,2,4,8"),
    )
    stages: int | None = option(
        None, "N", "Stages of a pipeline: shows how much of a window they idle.", check=_COUNT
    )
    lr: float | None = _follower(
        None, "RATE", "Learning rate that works for --base-batch.", check=positive_number
    )
    base_batch: int | None = _follower(
        None, "N", "Batch size that --lr and --warmup were chosen for.", check=_COUNT
    )
    lr_rule: str | None = choice(
        "linear|sqrt|none",
        "How the learning rate follows the batch size. Without --lr, the factor is shown. Default: "
        "linear, with sqrt beside it.",
        _FOLLOWS,
        default=None,
    )
    warmup: int | None = _follower(None, "N", "Warm-up at --base-batch, in updates.", check=_COUNT)
    as_json: bool = switch("Print JSON.", flag="--json")


@command(
    ScaleOptions,
    "wholebatch scale --batch-size 512 --micro-batch 8",
    "wholebatch scale --batch-size 512 --micro-batch 8 --base-batch 64 --lr 3e-4",
)
def scale(options: ScaleOptions) -> None:
    """Work out batch, micro-batch, steps and ranks from each other.

    With --base-batch, also the learning rate and the warm-up at the new batch size.
    Remainders are shown: the share of each rank and the size of each micro-batch.
    """
    table = _table(options)
    sizes = {row.batch_size for row in table}
    batch = sizes.pop() if len(sizes) == 1 else None
    _check_partners(options, batch)
    follows = [] if batch is None else [*_follows(options, batch)]
    if options.as_json:
        batches: dict[str, Any] = {"batches": [row.as_dict() for row in table]}
        if options.stages is not None:
            batches["bubble"] = [scaling.bubble(row.steps, options.stages) for row in table]
        print(json.dumps(batches | {name: value for name, value, _ in follows}, indent=2))
        return
    console = console_of()
    names = (">ranks", ">batch", ">micro-batch", ">steps", ">per rank")
    grid = plain_table(*names, "micro-batch × steps × ranks", padding=(0, 2, 0, 0))
    for row in table:
        shares = " or ".join(map(str, sorted(set(row.shares), reverse=True)))
        numbers = (row.ranks, row.batch_size, row.micro_batch, row.steps)
        grid.add_row(*map(str, numbers), shares, str(row))
    console.print(grid, highlight=False)
    if options.steps is not None and any(row.steps < options.steps for row in table):
        text = f"note: --steps {options.steps}: rows with fewer steps already hold the whole batch"
        say(console, text)
    if options.stages is not None:
        idle = scaling.bubble(table[0].steps, options.stages)
        text = (
            f"pipeline of {options.stages} stages: it idles for {idle:.0%} of a window of "
            f"{table[0].steps} micro-batches; for 10% of {9 * (options.stages - 1)}"
        )
        say(console, text)
    for _, _, line in follows:
        say(console, line)


def _table(options: ScaleOptions) -> list[scaling.Arithmetic]:
    """Return the arithmetic for every number of ranks."""
    batch, ranks = options.batch_size, options.ranks
    if batch is not None and ranks and max(ranks) > batch:
        raise OptionError(
            f"--ranks {max(ranks)} with --batch-size {batch}: some ranks would have no sample; "
            f"give at most {batch} ranks, or a larger batch"
        )
    sizes_asked = {"batch_size": batch, "micro_batch": options.micro_batch, "steps": options.steps}
    over: Sequence[int | None] = ranks or (
        (None,) if None not in sizes_asked.values() else (1, 2, 4, 8)
    )
    return [scaling.solve(**sizes_asked, ranks=count) for count in over]


def _check_partners(options: ScaleOptions, batch: int | None) -> None:
    """Refuse an option without the one that it needs; `batch` is None if it differs by ranks."""
    names = ("lr", "lr_rule", "warmup", "base_batch")
    asked = ["--" + n.replace("_", "-") for n in names if getattr(options, n) is not None]
    if asked and options.base_batch is None:
        raise OptionError(f"{asked[0]}: also give --base-batch, the batch size that it is for")
    if asked and batch is None:
        raise OptionError(
            f"{asked[0]}: the batch differs between the ranks given; give one --ranks, or a "
            "--batch-size"
        )


def _follows(options: ScaleOptions, batch: int) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield what goes with the batch size: its name, its value for JSON, and a line."""
    base = options.base_batch
    if base is None:
        return
    yield "lr", *_rate(options.lr, options.lr_rule or "linear", base, batch)
    if options.lr_rule is None:
        yield "lr_sqrt", *_rate(options.lr, "sqrt", base, batch)
    if options.warmup is not None:
        yield "warmup", *_warmup(options.warmup, base, batch)


def _rate(lr: float | None, rule: str, base: int, batch: int) -> tuple[dict[str, Any], str]:
    factor = scaling.lr_factor(base_batch=base, batch=batch, rule=rule)
    scaled = None if lr is None else lr * factor
    rates = f"{base} → {batch}" if lr is None else f"{lr:g} for {base} → {scaled:.6g} for {batch}"
    value = {"rule": rule, "factor": factor, "base": lr, "scaled": scaled}
    return value, f"learning rate {rates}: ×{factor:.6g} ({rule}: {_SOURCE[rule]})"


def _warmup(at_base: int, base: int, batch: int) -> tuple[dict[str, Any], str]:
    same = scaling.scale_warmup(at_base, base_batch=base, batch=batch)
    longer = scaling.scale_warmup(at_base, base_batch=batch, batch=base)
    line = (
        f"warm-up {at_base:,} updates for {base} → for {batch}: {same:,} over the same samples "
        f"(Goyal et al. 2017); {at_base:,} over the same updates (You et al. 2019); {longer:,}, "
        f"times {batch / base:.3g} like the batch (the most careful)"
    )
    value = {"base": at_base, "same_samples": same, "same_updates": at_base, "times_k": longer}
    return value, line
