"""`wholebatch scale`: the arithmetic of a batch on any number of ranks, and what follows it."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from wholebatch.cli.run_settings import check
from wholebatch.errors import OptionError
from wholebatch.tune.batch_scaling import (
    Arithmetic,
    adam_betas,
    epochs_in_updates,
    half_life,
    lr_factor,
    parse_amount,
    scale_warmup,
    solve,
)

__all__ = ["scale"]

_WIDE = 60  # columns that the table needs
_FOLLOWS = "What follows the batch"
_SOURCE = {
    "linear": "Goyal et al. 2017, SGD",
    "sqrt": "Krizhevsky 2014; Malladi et al. 2022, Adam",
    "none": "unchanged",
}


def scale(
    batch_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="Samples that make one update, on all ranks together."),
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(metavar="N", help="Samples in memory at a time, on a rank.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Micro-batches that make one update, on a rank.")
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,…",
            help="Ranks (GPUs). Default: 1, 2, 4, 8; what is needed, where all others are given.",
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            metavar="RATE", help="A learning rate good for --base-batch.", rich_help_panel=_FOLLOWS
        ),
    ] = None,
    base_batch: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="The batch that --lr, --warmup and the betas were good for.",
            rich_help_panel=_FOLLOWS,
        ),
    ] = None,
    lr_rule: Annotated[
        str | None,
        typer.Option(
            metavar="linear|sqrt|none",
            help="How the learning rate follows; without --lr the factor is shown. Default: "
            "linear.",
            rich_help_panel=_FOLLOWS,
        ),
    ] = None,
    warmup: Annotated[
        str | None,
        typer.Option(
            metavar="N|Nep",
            help="Warm-up at --base-batch, in updates or epochs (epochs need --samples).",
            rich_help_panel=_FOLLOWS,
        ),
    ] = None,
    betas: Annotated[
        str | None,
        typer.Option(
            metavar="B1,B2", help="Adam's betas at --base-batch.", rich_help_panel=_FOLLOWS
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(metavar="N", help="Samples of an epoch.", rich_help_panel=_FOLLOWS),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The arithmetic of a batch: any of batch, micro-batch, steps and ranks from the others.

    With --base-batch also the learning rate, the warm-up and Adam's betas at the new batch size.
    Every remainder is shown: the share of every rank, the size of every micro-batch.
    """
    sizes = {"batch_size": batch_size, "micro_batch": micro_batch, "steps": steps}
    for name, value in {**sizes, "base_batch": base_batch, "samples": samples}.items():
        if value is not None and value < 1:
            flag = "--" + name.replace("_", "-")
            raise OptionError(f"{flag} {value}: must be a whole number, at least 1")
    check("lr", lr, "--lr")
    check("lr_rule", lr_rule, "--lr-rule")
    table = _solved(batch_size, micro_batch, steps, _numbers(ranks))
    follows = _follows(
        table[0].global_batch if _is_one(table) else None,
        lr=lr,
        base=base_batch,
        rule=lr_rule,
        warmup=warmup,
        betas=betas,
        samples=samples,
    )
    if as_json:
        content = {"batches": [one.as_dict() for one in table], **follows["values"]}
        print(json.dumps(content, indent=2))
        return
    _show(table, follows["said"])


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise OptionError(f"--ranks {text}: must be numbers of ranks, such as 8 or 1,2,4,8")
    return [int(part) for part in parts]


def _solved(
    batch: int | None, micro: int | None, steps: int | None, ranks: list[int] | None
) -> list[Arithmetic]:
    if sum(value is not None for value in (batch, micro, steps)) < 2:
        raise OptionError(
            "give two of --batch-size, --micro-batch and --steps; the rest follows "
            "(--ranks: 1, 2, 4 and 8 unless given)"
        )
    if None not in (batch, micro, steps):
        given: list[int | None] = [None] if ranks is None else [*ranks]
        return [
            solve(global_batch=batch, micro_batch=micro, steps=steps, ranks=one) for one in given
        ]
    return [
        solve(global_batch=batch, micro_batch=micro, steps=steps, ranks=one)
        for one in ranks or (1, 2, 4, 8)
    ]


def _is_one(table: list[Arithmetic]) -> bool:
    return len({one.global_batch for one in table}) == 1


def _follows(
    batch: int | None,
    *,
    lr: float | None,
    base: int | None,
    rule: str | None,
    warmup: str | None,
    betas: str | None,
    samples: int | None,
) -> dict[str, Any]:
    """What goes with the batch: values for JSON, and lines for people."""
    values: dict[str, Any] = {}
    said: list[tuple[str, str]] = []
    asks = {"--lr": lr, "--lr-rule": rule, "--warmup": warmup, "--betas": betas}
    asked = [flag for flag, value in asks.items() if value is not None]
    if asked and base is None:
        raise OptionError(f"{asked[0]}: also give --base-batch, the batch size that it is for")
    shows_rate = lr is not None or rule is not None or not asked
    asked += [flag for flag, at in (("--base-batch", base), ("--samples", samples)) if at]
    if asked and batch is None:
        raise OptionError(
            f"{asked[0]}: the batch differs between the ranks given; give one --ranks, or a "
            "--batch-size"
        )
    if samples is not None and batch is not None:
        updates = -(-samples // batch)
        last = samples - (updates - 1) * batch
        values["epoch"] = {"updates": updates, "last_batch": last}
        short = "" if last == batch else f", the last with {last}"
        many = "1 update" if updates == 1 else f"{updates:,} updates"
        said.append(("epoch", f"{samples:,} samples: {many}{short}"))
    if base is None or batch is None:
        return {"values": values, "said": said}
    if shows_rate:
        rule = rule or "linear"
        factor = lr_factor(base_batch=base, batch=batch, rule=rule)
        scaled = None if lr is None else lr * factor
        if scaled == math.inf:
            raise OptionError(f"--lr {lr:g}: times {factor:g} is more than a number can be")
        values["lr"] = {"rule": rule, "factor": factor, "base": lr, "scaled": scaled}
        rates = (
            f"{base} → {batch}" if lr is None else f"{lr:g} for {base} → {scaled:.6g} for {batch}"
        )
        said.append(("learning rate", f"{rates}: ×{factor:.6g} ({rule}: {_SOURCE[rule]})"))
    if warmup is not None:
        amount = parse_amount(warmup, f"--warmup {warmup}")
        if amount.by == "tokens" or (amount.by == "epochs" and samples is None):
            raise OptionError(f"--warmup {warmup}: must be updates, or epochs beside --samples")
        at_base = amount.number
        if amount.by == "epochs":
            assert samples is not None
            at_base = epochs_in_updates(amount.number, samples=samples, batch=base)
            same = epochs_in_updates(amount.number, samples=samples, batch=batch)
        else:
            same = scale_warmup(at_base, base_batch=base, batch=batch)
        values["warmup"] = {"base": at_base, "same_samples": same, "same_updates": at_base}
        said.append(
            (
                "warm-up",
                f"{at_base:,} updates for {base} → {same:,} for {batch} over the same samples "
                f"(Goyal et al. 2017); {at_base:,} over the same updates (You et al. 2019)",
            )
        )
    if betas is not None:
        pair = _pair(betas)
        new = adam_betas(pair, base_batch=base, batch=batch, first=True)
        values["betas"] = {"base": list(pair), "scaled": list(new)}
        said.append(
            (
                "betas",
                f"β2 {pair[1]:g} → {new[1]:.6g} (β1 {pair[0]:g} → {new[0]:.6g}), half-life "
                f"{half_life(pair[1], tokens=base):,.0f} samples for β2 either way "
                "(Marek et al. 2025)",
            )
        )
    return {"values": values, "said": said}


def _pair(text: str) -> tuple[float, float]:
    try:
        first, second = (float(part) for part in text.split(","))
        if not (0 <= first < 1 and 0 <= second < 1):
            raise ValueError
    except ValueError:
        raise OptionError(
            f"--betas {text}: must be two numbers, at least 0 and below 1, such as 0.9,0.95"
        ) from None
    return first, second


def _show(table: list[Arithmetic], said: list[tuple[str, str]]) -> None:
    console = Console()
    if console.width < _WIDE:
        for one in table:
            facts = f"batch {one.global_batch}, micro-batch {one.micro_batch}, steps {one.steps}"
            line = f"{one.ranks} rank{'' if one.ranks == 1 else 's'}: {facts}: {one}"
            console.print(line, highlight=False, markup=False)
        _say(console, said)
        return
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("ranks", "batch", "micro-batch", "steps", "on a rank"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("micro-batch × steps × ranks", overflow="fold")
    for one in table:
        shares = sorted(set(one.shares), reverse=True)
        grid.add_row(
            str(one.ranks),
            str(one.global_batch),
            str(one.micro_batch),
            str(one.steps),
            " or ".join(map(str, shares)),
            str(one),
        )
    console.print(grid)
    _say(console, said)


def _say(console: Console, said: list[tuple[str, str]]) -> None:
    for label, line in said:
        console.print(f"{label:<14} {line}", highlight=False, soft_wrap=True, markup=False)
