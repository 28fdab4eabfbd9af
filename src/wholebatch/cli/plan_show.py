"""How a plan is shown: bars of memory by category, and a table of other settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from wholebatch.memory.plan import Plan

__all__ = ["show"]

_COLORS = {
    "parameters": "blue",
    "gradients": "cyan",
    "optimizer state": "magenta",
    "activations": "green",
    "temporaries": "yellow",
    "buffers": "white",
    "inputs": "white",
    "communication": "red",
}
_BAR = 42
_NUMBERS = 36  # columns that stand before a bar


def show(console: Console, plan: Plan) -> None:
    """The table of sizes, the choice, and what other settings would change."""
    from wholebatch.memory.budget import bytes_said

    room = min(_BAR, console.width - _NUMBERS)
    has_bars = room >= 8  # on a narrow terminal they would take the place of the numbers
    scale = max(plan.budget, *(point.peak for point in plan.points)) / max(room, 8)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("micro-batch", justify="right", no_wrap=True)
    table.add_column("peak", justify="right", no_wrap=True)
    table.add_column("used", justify="right", no_wrap=True)
    if has_bars:
        table.add_column("", no_wrap=True)
    for point in plan.points:
        chosen = point.micro_batch == plan.micro_batch
        style = "bold" if chosen else "" if point.fits else "dim"
        table.add_row(
            Text(("▶ " if chosen else "") + str(point.micro_batch), style),
            Text(bytes_said(point.peak), style),
            Text(f"{100 * point.peak / plan.budget:.0f}%", style if point.fits else "red"),
            *([_bar(point.by_category, scale, limit=round(plan.budget / scale))] * has_bars),
        )
    console.print(table)
    if has_bars:
        console.print(_legend(plan), highlight=False)
    if plan.micro_batch is None:
        from wholebatch.memory.make_it_fit import refusal

        said = refusal(list(plan.rungs), plan.budget)
        console.print(f"\n[red]{said}[/]", highlight=False, soft_wrap=True)
    else:
        larger = "" if plan.largest == plan.micro_batch else f" (up to {plan.largest} would fit)"
        console.print(f"\n[bold]{plan.arithmetic()}[/]{larger}", highlight=False, soft_wrap=True)
    if plan.variants:
        console.print(_variants(plan))


def _bar(by_category: dict[str, int], scale: float, *, limit: int) -> Text:
    """One stacked bar; `│` is where the budget ends."""
    bar = Text()
    filled, at = 0, 0.0
    for name in _COLORS:
        at += by_category.get(name, 0) / scale
        bar.append("█" * (round(at) - filled), style=_COLORS[name])
        filled = round(at)
    if filled < limit:
        bar.append(" " * (limit - filled) + "│")
    elif filled > limit:
        bar = bar[:limit] + Text("│", "bold red") + bar[limit:]
    else:
        bar.append("│")
    return bar


def _legend(plan: Plan) -> Text:
    legend = Text()
    for name, color in _COLORS.items():
        if any(point.by_category.get(name, 0) * 100 > point.peak for point in plan.points):
            legend.append("█ ", style=color).append(f"{name}  ")
    return legend


def _variants(plan: Plan) -> Table:
    from wholebatch.memory.budget import bytes_said

    size = plan.variants[0].micro_batch
    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        header_style="bold",
        title="\nWhat other settings would change",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("precision")
    table.add_column("checkpointing")
    table.add_column("gradients")
    table.add_column(f"peak at {size}", justify="right")
    table.add_column("micro-batch that fits, about", justify="right")
    for variant in plan.variants:
        table.add_row(
            variant.precision,
            "per block" if variant.checkpointing else "no",
            variant.sync
            or variant.gradients + (" (approximate)" if variant.gradients == "moments" else ""),
            bytes_said(variant.peak),
            str(variant.about) if variant.about else "not even 1",
        )
    return table
