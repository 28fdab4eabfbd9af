"""The terminal output of a run: header, progress, summary. A bar on a terminal, lines in a log."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

_SECONDS_BETWEEN_LINES = 5.0


class Terminal:
    """Shows one run on `console`; prints plain lines if that is not a terminal."""

    def __init__(self, console: Console, *, name: str, unit: str) -> None:
        self._console = console
        self._name = name
        self._unit = unit
        self._live = console.is_terminal
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._total = 0
        self._done = 0
        self._began = 0.0
        self._began_at = 0
        self._last_line = float("-inf")

    def rows(self, title: str, rows: Sequence[tuple[str, str]], *, boxed: bool = False) -> None:
        """Print a title and labelled values, one under the other."""
        if not self._live:
            width = max(len(label) for label, _ in rows)
            self._line(title)
            for label, value in rows:
                self._line(f"  {label:<{width}}  {value}")
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for label, value in rows:
            table.add_row(escape(label), escape(value))
        if boxed:
            panel = Panel(
                table, title=f"[bold]{escape(title)}[/]", title_align="left", expand=False
            )
            self._console.print(panel)
        else:
            self._console.print(f"[bold]{escape(title)}[/]", highlight=False)
            self._console.print(table)

    def note(self, text: str) -> None:
        """Print one line, above the bar if there is one."""
        if self._live:
            self._console.print(escape(text), highlight=False, soft_wrap=True)
        else:
            self._line(text)

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Show a status while something takes a moment; a log shows nothing."""
        if not self._live:
            yield
            return
        with self._console.status(escape(what)):
            yield

    def begin(self, *, done: int, total: int) -> None:
        """Start the progress at `done` of `total` updates."""
        self._total, self._done, self._began_at = total, done, done
        self._began = time.perf_counter()
        if self._live:
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[place]}"),
                TextColumn("[green]{task.fields[saying]}"),
                console=self._console,
                expand=True,
                transient=True,
            )
            self._task = self._progress.add_task(
                escape(self._name),
                total=total,
                completed=done,
                place=f"{done}/{total}",
                saying="first update …",
            )
            self._progress.start()

    def micro(self, done: int, of: int) -> None:
        """Show that `done` of the `of` micro-batches of the next update are done."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=self._done + done / of)

    def update(
        self, *, updates: int, loss: float, units_per_second: float, doing: str | None = None
    ) -> None:
        """Show that one more window is closed; `doing` is what goes on beside the run."""
        self._done = updates
        left = self._time_left(updates)
        saying = f"loss {loss:.3f}  {short_count(units_per_second)} {self._unit}/s"
        saying += f"  {left} left" if left else ""
        saying += f"  ({doing})" if doing else ""
        if self._progress is not None and self._task is not None:
            self._progress.update(
                self._task, completed=updates, place=f"{updates}/{self._total}", saying=saying
            )
            return
        now = time.perf_counter()
        is_edge = updates >= self._total or updates == self._began_at + 1
        if is_edge or now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._line(f"update {updates}/{self._total}  {saying}")

    def end(self) -> None:
        """Stop the progress: remove the bar and restore the cursor."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _time_left(self, updates: int) -> str:
        made = updates - self._began_at
        if made <= 0 or updates >= self._total:
            return ""
        return short_duration((time.perf_counter() - self._began) / made * (self._total - updates))

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()  # Show it at once to a reader who follows the log.


def plain_table(*columns: str, **style: Any) -> Table:
    """Return a table without lines; a column whose name begins with ">" is aligned to the right."""
    table = Table(**{"box": None, "padding": (0, 3, 0, 0), "header_style": "dim", **style})
    for name in columns:
        is_right = name.startswith(">")
        table.add_column(
            name.removeprefix(">"),
            justify="right" if is_right else "left",
            overflow="ellipsis" if is_right else "fold",
        )
    return table


def short_count(number: float) -> str:
    """Return a number in short form.

    >>> short_count(812), short_count(12_345), short_count(4_560_000), short_count(7.3)
    ('812', '12.3k', '4.56M', '7.3')
    """
    for limit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit * 0.9995:
            return f"{number / limit:#.3g}".rstrip(".") + name
    return f"{number:.3g}" if number < 10 else f"{number:.0f}"


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
