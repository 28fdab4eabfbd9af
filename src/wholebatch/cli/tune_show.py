"""A tuning on the terminal: how far it is, then the answer, the evidence, the next command."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from wholebatch.cli.report.terminal_output import count_said, shown, time_said
from wholebatch.core.readable_sizes import bytes_said
from wholebatch.tune import PARTS, Setting, Trial, Tuned

__all__ = ["Bar", "show"]


class Bar:
    """What is measured now, the best so far, the time left; lines where there is no terminal."""

    def __init__(self, console: Console, *, unit: str) -> None:
        self._console = console
        self._unit = unit
        self._live = console.is_terminal
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._began = time.perf_counter()
        self._done = 0
        self._best = 0.0

    def __enter__(self) -> Bar:
        if self._live:
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("[green]{task.fields[saying]}"),
                console=self._console,
                expand=True,
                transient=True,
            )
            self._task = self._progress.add_task("predicting memory", total=None, saying="")
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, setting: Setting, *, of: int) -> None:
        """This one is measured now; at most `of` are left with it."""
        saying = f"best {count_said(self._best)} {self._unit}/s" if self._best else ""
        if self._done:
            each = (time.perf_counter() - self._began) / self._done
            saying += f"  at most {time_said(each * of)} left"
        if self._progress is not None and self._task is not None:
            self._progress.update(
                self._task,
                description=escape(setting.said()),
                completed=self._done,
                total=self._done + of,
                saying=saying,
            )

    def end(self, trial: Trial) -> None:
        """This is what was found."""
        self._done += 1
        rate = trial.units_per_second
        if rate and trial.is_measured:
            self._best = max(self._best, rate)
        speed = f"{count_said(rate)} {self._unit}/s" if rate else "no speed"
        peak = f", {bytes_said(trial.peak)}" if trial.peak else ""
        line = f"{trial.setting.said()}: {speed}{peak} ({trial.why})"
        if self._progress is not None:
            self._progress.console.print(escape(line), highlight=False, style="dim")
        else:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def show(console: Console, tuned: Tuned, *, subject: str, out: Path, page: Path | None) -> None:
    """The recommendation and why."""
    head, *more = tuned.advice
    body = [Text(head, style="bold green"), *(Text(line) for line in more)]
    console.print(
        Panel(
            Group(*body),
            title=f"[bold]{escape(subject)}[/]: batch of {tuned.batch_size} on {tuned.device}",
            title_align="left",
            border_style="green",
            expand=False,
            padding=(1, 2),
        )
    )
    console.print(_split_table(tuned), highlight=False)
    console.print(f"[bold]bottleneck: {tuned.bottleneck.kind}[/]", highlight=False)
    for line in (*tuned.bottleneck.evidence, *tuned.accumulation):
        console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)
    if tuned.ranks is not None:
        console.print(_ranks(tuned), highlight=False)
    console.print(f"written to {escape(shown(out))}", highlight=False, soft_wrap=True)
    if page is not None:
        console.print(f"page       {escape(shown(page))}", highlight=False, soft_wrap=True)
    console.print(
        f"train so:  wholebatch train --from {escape(shown(out))}", highlight=False, soft_wrap=True
    )


def _split_table(tuned: Tuned) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("a window")
    table.add_column("ms", justify="right")
    table.add_column("", justify="right")
    split = tuned.best.split
    window = sum(split.values()) or 1.0
    for part in PARTS:
        if split.get(part):
            table.add_row(part, f"{1000 * split[part]:.2f}", f"{split[part] / window:.0%}")
    return table


def _ranks(tuned: Tuned) -> Table:
    assert tuned.ranks is not None
    table = Table(
        box=None,
        padding=(0, 3, 0, 0),
        header_style="dim",
        title=escape(tuned.ranks["said"]),
        title_justify="left",
        title_style="italic",
    )
    table.add_column("ranks", justify="right")
    table.add_column(f"{tuned.unit}/s, nothing overlapped", justify="right")
    table.add_column("all overlapped", justify="right")
    table.add_column("reduction", justify="right")
    for point in tuned.ranks["points"]:
        table.add_row(
            str(point["ranks"]),
            count_said(point["units_per_second"]),
            count_said(point["units_per_second_overlapped"]),
            f"{point['communication_share']:.0%}",
        )
    return table
