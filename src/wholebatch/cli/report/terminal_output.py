"""The terminal output of a run: header, progress bar or log lines, summary."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from wholebatch.readable_sizes import short_count

_SECONDS_BETWEEN_LINES = 5.0


class Terminal:
    """Shows one run on `console`; prints plain lines if that is not a terminal."""

    def __init__(self, console: Console, *, name: str, unit: str) -> None:
        self.console = console
        self._name = name
        self._unit = unit
        self._live = console.is_terminal
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[place]}"),
            TextColumn("[green]{task.fields[saying]}"),
            console=console,
            expand=True,
            transient=True,
            disable=not self._live,
        )
        self._task = TaskID(0)
        self._first = self._total = 0
        self._last_line = float("-inf")

    def rows(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Print a title and labelled values, one under the other."""
        if not self._live:
            width = max(len(label) for label, _ in rows)
            self.note(title)
            for label, value in rows:
                self.note(f"  {label:<{width}}  {value}")
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for label, value in rows:
            table.add_row(escape(label), escape(value))
        say(self.console, title, style="bold")
        self.console.print(table)

    def note(self, text: str) -> None:
        """Print one line, above the bar if there is one."""
        say(self.console, text)

    def begin(self, *, done: int, total: int) -> None:
        """Start the progress at `done` of `total` updates."""
        self._first, self._total = done + 1, total
        place, saying = f"{done}/{total}", "first update …"
        self._task = self._progress.add_task(
            escape(self._name), total=total, completed=done, place=place, saying=saying
        )
        self._progress.start()

    def update(
        self, *, updates: int, loss: float, units_per_second: float | None, left: float | None
    ) -> None:
        """Show that one more window is closed; `left` are the seconds that the rest will take."""
        self._progress.update(self._task, completed=updates)
        saying = f"loss {loss:.3f}"
        if units_per_second is not None:
            saying += f"  {short_count(units_per_second)} {self._unit}/s"
        saying += f"  {short_duration(left)} left" if left else ""
        place = f"{updates}/{self._total}"
        self._progress.update(self._task, place=place, saying=saying)
        now = time.perf_counter()
        is_due = now - self._last_line >= _SECONDS_BETWEEN_LINES
        if not self._live and (is_due or updates in (self._first, self._total)):
            self._last_line = now
            self.note(f"update {place}  {saying}")

    def end(self) -> None:
        """Stop the progress: remove the bar and restore the cursor."""
        self._progress.stop()


class Spinner(Progress):
    """Says what is happening and for how long, on a terminal; a log shows nothing."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._now = self.add_task("", total=None)

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None:
        """Show this line; if some of a total is done, the time that the rest will take, too."""
        if done:
            left = (self.tasks[self._now].elapsed or 0.0) / done * (total - done)
            what += f", {done} of {total}, {short_duration(left)} left"
            self.update(self._now, description=escape(what))
            return
        self.reset(self._now, description=escape(what))
        self.start()


def console_of(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return the console of this process: only the first of several ranks speaks."""
    if quiet or os.environ.get("RANK", "0") != "0":
        return Console(quiet=True, force_terminal=False)
    console = Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 10_000  # rows are wrapped on a terminal only
    return console


def say(console: Console, text: str | Text, *, style: str = "", indent: int = 0) -> None:
    """Print a paragraph at once: wrapped between words on a terminal, one line in a log."""
    said = text if isinstance(text, Text) else Text(text, style)
    if console.is_terminal:
        console.print(Padding(said, (0, 0, 0, indent)), highlight=False)
    else:
        console.print(Text(" " * indent) + said, highlight=False, soft_wrap=True)
        console.file.flush()


def say_command(console: Console, label: str, line: str) -> None:
    """Print a command line for copying."""
    console.print(f"{label} {line}", highlight=False, soft_wrap=True, markup=False)


def plain_table(*columns: str, **style: Any) -> Table:
    """Return a table without lines; one that is too wide is wrapped, and never cut.

    A column whose name begins with ">" is aligned to the right.
    """
    plain = {"box": None, "padding": (0, 3, 0, 0), "header_style": "dim", "pad_edge": False}
    table = Table(**{**plain, "title_justify": "left", "title_style": "bold", **style})
    for name in columns:
        justify: Any = "right" if name.startswith(">") else "left"
        table.add_column(name.lstrip(">"), justify=justify, overflow="fold")
    return table


def short_duration(seconds: float) -> str:
    """Return a duration in short form.

    >>> short_duration(4.4), short_duration(83), short_duration(7325), short_duration(200_000)
    ('0:04', '1:23', '2:02:05', '2 d 7 h')
    """
    whole = round(seconds)
    if whole >= 86_400:
        return f"{whole // 86_400} d {whole % 86_400 // 3600} h"
    if whole >= 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
    return f"{whole // 60}:{whole % 60:02d}"


def path_from_here(path: Path) -> str:
    """Return a path as a person would type it from here."""
    absolute = Path(os.path.abspath(path))
    try:
        return str(absolute.relative_to(Path.cwd()))
    except ValueError:
        return str(absolute)
