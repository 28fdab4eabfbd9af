"""A verdict on the terminal: the answer first, then the evidence, then what to do."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from wholebatch.verification import LoopTrial, LoopVerdict, Verdict
from wholebatch.verification.mistakes import MISTAKES, RIGHT
from wholebatch.verification.run_comparison import Comparison, percent
from wholebatch.verification.verdicts import listed

__all__ = ["show_loop", "show_verdict"]


def show_verdict(console: Console, title: str, verdict: Verdict) -> None:
    """The proof on one model and batch."""
    size = f"{verdict.samples} samples in {verdict.micro_batches} micro-batches"
    if verdict.samples < verdict.of_samples:
        size += f" (the largest part of {verdict.of_samples} that fits undivided)"
    if verdict.ranks > 1:
        size += f", on each of {verdict.ranks} ranks"
    body: list[RenderableType] = [
        _answer(verdict.same, ": an approximation, as asked for" if verdict.approximate else ""),
        Text(f"{size} · {verdict.precision} · {verdict.device} · {verdict.seconds:.1f} s", "dim"),
        Text(),
        _distances(verdict),
    ]
    console.print(
        Panel(
            Group(*body),
            title=f"[bold]{escape(title)}[/]",
            title_align="left",
            border_style="green" if verdict.same else "red",
            expand=False,
            padding=(1, 2),
        )
    )
    console.print(_worst(verdict.gradient, 4 if verdict.same else 8))
    if not verdict.same:
        for cause in verdict.causes:
            where = f" in [bold]{escape(listed(cause.where))}[/]" if cause.where else ""
            _block(console, f"[red bold]{escape(cause.kind)}[/]{where}", cause.evidence)
            _block(console, "[green]instead[/]", cause.advice)
    for note in verdict.notes:
        _block(console, "[yellow]note[/]", note)


def _answer(same: bool, what: str = "") -> Text:
    if same:
        return Text("✓ the same update as the undivided batch", style="bold green")
    return Text(f"✗ not the update of the undivided batch{what}", style="bold red")


def _distances(verdict: Verdict) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("")
    table.add_column("off by", justify="right")
    table.add_column("rounding explains", justify="right")
    table.add_column("")
    rows = [verdict.gradient, verdict.update]
    if verdict.float64 is not None:
        rows.append(verdict.float64)
    for row in rows:
        mark = "[green]✓[/]" if row.same else "[red]✗[/]"
        table.add_row(row.what, percent(row.distance), percent(row.tolerance), mark)
    if verdict.to_float64 is not None and verdict.precision != "full":
        whole, ours = verdict.to_float64
        table.add_row("from float64: undivided", percent(whole), "", "")
        table.add_row("from float64: accumulated", percent(ours), percent(1.25 * whole), "")
    return table


def _worst(comparison: Comparison, number: int) -> Table:
    table = Table(
        title="the gradients that are furthest off, by what rounding explains",
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        padding=(0, 3, 0, 0),
    )
    table.add_column("parameter", overflow="fold")
    table.add_column("numbers", justify="right")
    table.add_column("off by", justify="right")
    table.add_column("rounding alone", justify="right")
    for line in comparison.worst(number):
        style = "red" if line.differs else "dim"
        table.add_row(
            escape(line.name),
            f"{line.numbers:,}",
            percent(line.distance),
            percent(line.floor),
            style=style,
        )
    return table


def show_loop(console: Console, verdict: LoopVerdict) -> None:
    """The verdict on someone's loop: every window it was given, and the evidence."""
    mistake = verdict.mistake
    body: list[RenderableType] = []
    if verdict.same:
        body.append(_answer(True))
    elif mistake is not None:
        body.append(_answer(False, f": {mistake.name}"))
        body.append(Text(mistake.does))
        body.append(Text(f"Instead: {mistake.instead}", "green"))
    else:
        body.append(_answer(False, ", and no known mistake fits"))
    ranks = f" · {verdict.ranks} ranks" if verdict.ranks > 1 else ""
    about = f"{len(verdict.trials)} windows · {verdict.precision}{ranks} · {verdict.seconds:.1f} s"
    body.append(Text(about, "dim"))
    console.print(
        Panel(
            Group(*body),
            title=f"[bold]{escape(verdict.loop)}[/]",
            title_align="left",
            border_style="green" if verdict.same else "red",
            expand=False,
            padding=(1, 2),
        )
    )
    console.print(_windows(verdict))
    wrong = next((trial for trial in verdict.trials if trial.found != RIGHT), None)
    if wrong is not None:
        console.print()
        console.print(_evidence(wrong))
    for key in verdict.mistakes[1:]:
        also = MISTAKES[key]
        _block(console, f"[red]also: {also.name}[/]", f"{also.does}. Instead: {also.instead}")
    for note in dict.fromkeys(note for trial in verdict.trials for note in trial.notes):
        _block(console, "[yellow]note[/]", note)


def _windows(verdict: LoopVerdict) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("model")
    table.add_column("window", overflow="fold")
    table.add_column("steps", justify="right")
    table.add_column("off by", justify="right")
    table.add_column("found")
    before = ""
    for trial in verdict.trials:
        if trial.found == RIGHT:
            found = "[green]✓ right[/]"
        elif trial.found is None:
            found = "[red]✗ nothing known fits[/]"
        else:
            found = f"[red]✗ {MISTAKES[trial.found].name}[/]"
        case = "" if trial.case == before else trial.case
        before = trial.case
        off = percent(trial.right.distance) if trial.optimizer_steps <= 1 else "-"
        table.add_row(escape(case), trial.name, str(trial.optimizer_steps), off, found)
    return table


def _evidence(trial: LoopTrial) -> Table:
    what = "gradients that the optimizer saw" if trial.observed_by == "gradients" else "update"
    table = Table(
        title=f"how far the {what} are from each hypothesis ({trial.case}: {trial.name})",
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        padding=(0, 3, 0, 0),
    )
    table.add_column("hypothesis")
    table.add_column("distance", justify="right")
    table.add_column("")
    table.add_column("as", overflow="fold")
    for fit in trial.fits[:9]:
        mark = "[green]fits[/]" if fit.fits else ""
        style = "bold" if fit.key == trial.found else "" if fit.key == RIGHT else "dim"
        table.add_row(fit.name, percent(fit.distance), mark, escape(fit.variant), style=style)
    table.add_row("(fits within)", percent(trial.tolerance), "", "", style="dim")
    return table


def _block(console: Console, head: str, text: str) -> None:
    console.print(head, highlight=False)
    console.print(Padding(escape(text), (0, 0, 0, 2)), highlight=False)
