"""A benchmark on the terminal: which loop runs now, then all of them side by side."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from wholebatch.cli.report.terminal_output import bytes_said, shown
from wholebatch.tune.loop_comparison import Bench, Row

__all__ = ["Bar", "show"]

WRONG = 0.01
"""From here on it is no rounding: another gradient than that of the batch."""


class Bar:
    """The loop that is measured now and how long already; lines where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("reading the data", total=None)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def begin(self, name: str) -> None:
        """This one is measured now."""
        self._progress.reset(self._task, description=escape(name))

    def end(self, row: Row) -> None:
        """This is what was found."""
        said = row.why if row.window is None else f"{1000 * row.window:.1f} ms a window"
        self._progress.console.print(
            f"{row.name}: {said}", markup=False, highlight=False, soft_wrap=True, style="dim"
        )


def show(console: Console, measured: Bench, *, out: Path, page: Path | None) -> None:
    """The table, what to know beside it, and where it is written."""
    about = measured.about
    table = Table(
        title=escape(
            f"{about.get('subject', '')}: a batch of {about.get('batch_size', '')} in "
            f"{measured.steps} × {measured.micro_batch}, {about.get('precision', '')}, "
            f"{about.get('device', '')}"
        ),
        title_justify="left",
        header_style="dim",
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column("", no_wrap=True)
    table.add_column("ms a window", justify="right")
    table.add_column("× first", justify="right")
    table.add_column("memory", justify="right")
    table.add_column("gradient off by", justify="right")
    first = measured.rows[0].window
    fastest = min((row.window for row in measured.rows if row.window), default=None)
    for row in measured.rows:
        if row.window is None:
            continue
        style = "bold green" if row.window == fastest else ""
        table.add_row(
            escape(row.name),
            f"{1000 * row.window:.1f}",
            f"{row.window / first:.2f}" if first else "–",
            bytes_said(row.peak) if row.peak else "–",
            _off_said(row.off),
            style=style,
        )
    console.print(table, highlight=False)
    for note in measured.notes:
        console.print(f"  {escape(note)}", highlight=False, soft_wrap=True)
    console.print(f"written to {escape(shown(out))}", highlight=False, soft_wrap=True)
    if page is not None:
        console.print(f"page       {escape(shown(page))}", highlight=False, soft_wrap=True)


def _off_said(off: float | None) -> str:
    if off is None:
        return "–"
    return f"[bold red]{off:.0%}[/]" if off > WRONG else f"{off:.1g}"
