"""`wholebatch scale`: batch arithmetic on any number of ranks, and learning-rate rules."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from wholebatch.cli.run_settings import like_train
from wholebatch.errors import OptionError

_FOLLOWS = "Learning rate, warm-up, betas"
_follower = partial(option, panel=_FOLLOWS)
_COUNT = whole_number()
_SOURCE = {
    "linear": "Goyal et al. 2017, SGD",
    "sqrt": "Krizhevsky 2014; Malladi et al. 2022, Adam",
    "none": "unchanged",
}
_LABELS = {
    "epoch": "epoch",
    "lr": "learning rate",
    "warmup": "warm-up",
    "betas": "betas",
    "weight_decay": "weight decay",
}


def _warmup_of(text: str, label: str) -> tuple[int, bool]:
    """Return a number of updates, or of epochs and True."""
    amount = re.fullmatch(r"(\d{1,18})(ep)?", text.strip())
    if amount is None:
        raise OptionError(f"{label} {text}: must be a number of updates (500) or epochs (5ep)")
    return int(amount[1]), amount[2] is not None


def _beta(text: str) -> float:
    if not 0 <= float(text) < 1:
        raise ValueError(text)
    return float(text)


_BETAS = with_commas(
    _beta, "two numbers, at least 0 and below 1, such as 0.9,0.95", least=2, most=2
)


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
    betas: list[float] | None = option(
        None,
        "B1,B2",
        "Adam's betas at --base-batch, such as 0.9,0.95.",
        _FOLLOWS,
        typed=str | None,
        check=_BETAS,
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
    rows = plain_table("", "", show_header=False, padding=(0, 2, 0, 0))
    for name, _, line in follows:
        rows.add_row(_LABELS.get(name, ""), escape(line))
    if follows:
        console.print(rows, highlight=False)


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
    names = ("lr", "lr_rule", "warmup", "betas", "weight_decay", "base_batch", "samples")
    asked = ["--" + n.replace("_", "-") for n in names if getattr(options, n) is not None]
    if asked and options.base_batch is None and asked[0] != "--samples":
        raise OptionError(f"{asked[0]}: also give --base-batch, the batch size that it is for")
    if asked and batch is None:
        raise OptionError(
            f"{asked[0]}: the batch differs between the ranks given; give one --ranks, or a "
            "--batch-size"
        )


def _follows(options: ScaleOptions, batch: int) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield what goes with the batch size: its name, its value for JSON, and a line."""
    base, samples, decay = options.base_batch, options.samples, options.weight_decay
    if samples is not None:
        updates = -(-samples // batch)
        last = samples - (updates - 1) * batch
        short = "" if last == batch else f", the last with {last}"
        many = "1 update" if updates == 1 else f"{updates:,} updates"
        line = f"{samples:,} samples: {many}{short}"
        yield "epoch", {"updates": updates, "last_batch": last}, line
    if base is None:
        return
    rule, sizes = options.lr_rule or "linear", {"base_batch": base, "batch": batch}
    others = options.warmup is not None or options.betas is not None or decay is not None
    if options.lr is not None or options.lr_rule is not None or not others:
        yield "lr", *_rate(options.lr, rule, base, batch)
        if options.lr_rule is None:
            yield "lr_sqrt", *_rate(options.lr, "sqrt", base, batch)
    if options.warmup is not None:
        yield "warmup", *_warmup(options.warmup, samples, base, batch)
    if options.betas is not None:
        first, second = options.betas
        new = scaling.adam_betas((first, second), **sizes)
        line = (
            f"β2 {second:g} → {new[1]:.6g} (β1 {first:g} → {new[0]:.6g}), the same half-life in "
            "samples (Marek et al. 2025)"
        )
        yield "betas", {"base": [first, second], "scaled": list(new)}, line
    if decay is not None:
        scaled = scaling.scale_weight_decay(decay, **sizes, rule=rule)
        line = (
            f"{decay:g} for {base} → {scaled:.6g} for {batch} beside the learning rate of {rule}: "
            "the same half-life in tokens (Bergsma et al. 2025, AdamW)"
        )
        yield "weight_decay", {"base": decay, "scaled": scaled, "rule": rule}, line


def _rate(lr: float | None, rule: str, base: int, batch: int) -> tuple[dict[str, Any], str]:
    factor = scaling.lr_factor(base_batch=base, batch=batch, rule=rule)
    scaled = None if lr is None else lr * factor
    if scaled == math.inf:
        raise OptionError(f"--lr {lr:g}: times {factor:g} is more than a number can be")
    rates = f"{base} → {batch}" if lr is None else f"{lr:g} for {base} → {scaled:.6g} for {batch}"
    value = {"rule": rule, "factor": factor, "base": lr, "scaled": scaled}
    return value, f"{rates}: ×{factor:.6g} ({rule}: {_SOURCE[rule]})"


def _warmup(
    amount: tuple[int, bool], samples: int | None, base: int, batch: int
) -> tuple[dict[str, Any], str]:
    at_base, in_epochs = amount
    if in_epochs and samples is None:
        raise OptionError(f"--warmup {at_base}ep: give --samples too, those of an epoch")
    per_unit = samples if in_epochs and samples is not None else base
    same = scaling.scale_warmup(at_base, base_batch=per_unit, batch=batch)
    at_base = scaling.scale_warmup(at_base, base_batch=per_unit, batch=base)
    longer = scaling.scale_warmup(at_base, base_batch=batch, batch=base)
    line = (
        f"{at_base:,} updates for {base} → for {batch}: {same:,} over the same samples (Goyal et "
        f"al. 2017); {at_base:,} over the same updates (You et al. 2019); {longer:,}, times "
        f"{batch / base:.3g} like the batch (the most careful)"
    )
    value = {"base": at_base, "same_samples": same, "same_updates": at_base, "times_k": longer}
    return value, line
