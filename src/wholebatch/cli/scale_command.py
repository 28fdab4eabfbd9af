"""`wholebatch scale`: batch arithmetic on any number of ranks, and learning-rate rules."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.markup import escape

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
from wholebatch.errors import OptionError

_FOLLOWS = "Learning rate, warm-up, betas"
_follower = partial(option, panel=_FOLLOWS)
_COUNT = whole_number()
_SOURCE = {
    "linear": "Goyal et al. 2017, SGD",
    "sqrt": "Krizhevsky 2014; Malladi et al. 2022, Adam",
    "none": "unchanged",
}


def _warmup_of(text: str, label: str) -> tuple[int, bool]:
    """Return a number of updates, or of epochs and True."""
    amount = re.fullmatch(r"(\d{1,18})(ep)?", text.strip())
    if amount is None:
        raise OptionError(f"{label} {text}: must be a number of updates (500) or epochs (5ep)")
    return int(amount[1]), amount[2] is not None


def _pair(text: str, label: str) -> tuple[float, float]:
    try:
        first, second = (float(part) for part in text.split(","))
        if not (0 <= first < 1 and 0 <= second < 1):
            raise ValueError
    except ValueError:
        raise OptionError(
            f"{label} {text}: must be two numbers, at least 0 and below 1, such as 0.9,0.95"
        ) from None
    return first, second


@dataclass(frozen=True)
class ScaleOptions:
    """The options of `wholebatch scale`."""

    batch_size: int | None = option(None, "N", "Samples per update, over all ranks.", check=_COUNT)
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
    lr: float | None = _follower(
        None, "RATE", "Learning rate that works for --base-batch.", check=positive_number
    )
    base_batch: int | None = _follower(
        None, "N", "Batch size that --lr, --warmup and --betas were chosen for.", check=_COUNT
    )
    lr_rule: str | None = choice(
        "linear|sqrt|none",
        "How the learning rate follows the batch size. Without --lr, the factor is shown. Default: "
        "linear, with sqrt beside it.",
        _FOLLOWS,
        default=None,
    )
    warmup: tuple[int, bool] | None = _follower(
        None,
        "N|Nep",
        "Warm-up at --base-batch, in updates (500) or epochs (5ep, needs --samples).",
        typed=str | None,
        check=_warmup_of,
    )
    betas: tuple[float, float] | None = _follower(
        None,
        "B1,B2",
        "Adam's betas at --base-batch, such as 0.9,0.95.",
        typed=str | None,
        check=_pair,
    )
    weight_decay: float | None = _follower(
        None, "DECAY", "AdamW's weight decay at --base-batch.", check=positive_number
    )
    samples: int | None = _follower(None, "N", "Samples per epoch.", check=_COUNT)
    as_json: bool = switch("Print JSON.", flag="--json")


@command(
    ScaleOptions,
    "wholebatch scale --batch-size 512 --micro-batch 8",
    "wholebatch scale --batch-size 512 --micro-batch 8 --base-batch 64 --lr 3e-4",
)
def scale(options: ScaleOptions) -> None:
    """Work out batch, micro-batch, steps and ranks from each other.

    With --base-batch, also the learning rate, warm-up and Adam's betas at the new batch size.
    Remainders are shown: the share of each rank and the size of each micro-batch.
    """
    table = _solved(options.batch_size, options.micro_batch, options.steps, options.ranks)
    sizes = {one.batch_size for one in table}
    follows = [*_follows(options, sizes.pop() if len(sizes) == 1 else None)]
    if options.as_json:
        batches = {"batches": [one.as_dict() for one in table]}
        print(json.dumps(batches | {one.name: one.value for one in follows}, indent=2))
        return
    _show(table, follows, options.steps)


def _solved(
    batch: int | None, micro: int | None, steps: int | None, ranks: list[int] | None
) -> list[scaling.Arithmetic]:
    known = sum(value is not None for value in (batch, micro, steps))
    if known < 2:
        raise OptionError(
            "give two of --batch-size, --micro-batch and --steps; the rest follows "
            "(--ranks: 1, 2, 4 and 8 unless given)"
        )
    if batch is not None and ranks and max(ranks) > batch:
        raise OptionError(
            f"--ranks {max(ranks)} with --batch-size {batch}: some ranks would have no sample; "
            f"give at most {batch} ranks, or a larger batch"
        )
    over: Sequence[int | None] = ranks or ((None,) if known == 3 else (1, 2, 4, 8))
    return [
        scaling.solve(batch_size=batch, micro_batch=micro, steps=steps, ranks=one) for one in over
    ]


@dataclass(frozen=True)
class _Follower:
    """A value that goes with the batch size: for JSON, and as a line for people."""

    name: str
    value: dict[str, Any]
    label: str
    line: str


def _follows(options: ScaleOptions, batch: int | None) -> Iterator[_Follower]:
    """Yield the values that go with the batch; `batch` is None where it differs by rank count."""
    base, samples = options.base_batch, options.samples
    asked = _asked(options, batch)
    if batch is not None and samples is not None:
        yield _epoch(samples, batch)
    if batch is None or base is None:
        return
    rule = options.lr_rule or "linear"
    if {"--lr", "--lr-rule"} & asked or not {"--warmup", "--betas", "--weight-decay"} & asked:
        yield _rate(options.lr, rule, base, batch)
        if options.lr_rule is None:
            yield replace(_rate(options.lr, "sqrt", base, batch), name="lr_sqrt", label="")
    if options.warmup is not None:
        yield _warmup(options.warmup, samples, base, batch)
    if options.betas is not None:
        yield _betas(options.betas, base, batch)
    if options.weight_decay is not None:
        yield _weight_decay(options.weight_decay, rule, base, batch)


def _asked(options: ScaleOptions, batch: int | None) -> set[str]:
    """Return the options that ask for something that follows; refuse one without its partner."""
    names = ("lr", "lr_rule", "warmup", "betas", "weight_decay", "base_batch", "samples")
    asked = ["--" + n.replace("_", "-") for n in names if getattr(options, n) is not None]
    if asked and options.base_batch is None and asked[0] != "--samples":
        raise OptionError(f"{asked[0]}: also give --base-batch, the batch size that it is for")
    if asked and batch is None:
        raise OptionError(
            f"{asked[0]}: the batch differs between the ranks given; give one --ranks, or a "
            "--batch-size"
        )
    return set(asked)


def _epoch(samples: int, batch: int) -> _Follower:
    updates = -(-samples // batch)
    last = samples - (updates - 1) * batch
    short = "" if last == batch else f", the last with {last}"
    many = "1 update" if updates == 1 else f"{updates:,} updates"
    value = {"updates": updates, "last_batch": last}
    return _Follower("epoch", value, "epoch", f"{samples:,} samples: {many}{short}")


def _rate(lr: float | None, rule: str, base: int, batch: int) -> _Follower:
    factor = scaling.lr_factor(base_batch=base, batch=batch, rule=rule)
    scaled = None if lr is None else lr * factor
    if scaled == math.inf:
        raise OptionError(f"--lr {lr:g}: times {factor:g} is more than a number can be")
    rates = f"{base} → {batch}" if lr is None else f"{lr:g} for {base} → {scaled:.6g} for {batch}"
    value = {"rule": rule, "factor": factor, "base": lr, "scaled": scaled}
    line = f"{rates}: ×{factor:.6g} ({rule}: {_SOURCE[rule]})"
    return _Follower("lr", value, "learning rate", line)


def _warmup(amount: tuple[int, bool], samples: int | None, base: int, batch: int) -> _Follower:
    at_base, in_epochs = amount
    if in_epochs and samples is None:
        raise OptionError(f"--warmup {at_base}ep: give --samples too, those of an epoch")
    seen = at_base * (samples if in_epochs and samples is not None else base)
    at_base, same = -(-seen // base), -(-seen // batch)  # rounded up: never shorter than asked
    longer = -(-at_base * batch // base)
    line = (
        f"{at_base:,} updates for {base} → for {batch}: {same:,} over the same samples (Goyal et "
        f"al. 2017); {at_base:,} over the same updates (You et al. 2019); {longer:,}, times "
        f"{batch / base:.3g} like the batch (the most careful)"
    )
    value = {"base": at_base, "same_samples": same, "same_updates": at_base, "times_k": longer}
    return _Follower("warmup", value, "warm-up", line)


def _betas(pair: tuple[float, float], base: int, batch: int) -> _Follower:
    new = scaling.adam_betas(pair, base_batch=base, batch=batch)
    line = (
        f"β2 {pair[1]:g} → {new[1]:.6g} (β1 {pair[0]:g} → {new[0]:.6g}), the same half-life in "
        "samples (Marek et al. 2025)"
    )
    return _Follower("betas", {"base": list(pair), "scaled": list(new)}, "betas", line)


def _weight_decay(decay: float, rule: str, base: int, batch: int) -> _Follower:
    scaled = scaling.scale_weight_decay(decay, base_batch=base, batch=batch, rule=rule)
    line = (
        f"{decay:g} for {base} → {scaled:.6g} for {batch} beside the learning rate of {rule}: the "
        "same half-life in tokens (Bergsma et al. 2025, AdamW)"
    )
    value = {"base": decay, "scaled": scaled, "rule": rule}
    return _Follower("weight_decay", value, "weight decay", line)


def _show(table: list[scaling.Arithmetic], follows: list[_Follower], asked: int | None) -> None:
    console = console_of()
    names = (">ranks", ">batch", ">micro-batch", ">steps", ">per rank")
    grid = plain_table(*names, "micro-batch × steps × ranks", padding=(0, 2, 0, 0))
    for one in table:
        shares = " or ".join(map(str, sorted(set(one.shares), reverse=True)))
        numbers = (one.ranks, one.batch_size, one.micro_batch, one.steps)
        grid.add_row(*map(str, numbers), shares, str(one))
    console.print(grid, highlight=False)
    if asked is not None and any(one.steps < asked for one in table):
        say(console, f"note: --steps {asked}: rows with fewer steps already hold the whole batch")
    if follows:
        rows = plain_table("", "", show_header=False, padding=(0, 2, 0, 0))
        for follower in follows:
            rows.add_row(follower.label, escape(follower.line))
        console.print(rows, highlight=False)
