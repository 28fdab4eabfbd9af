"""What a page is made of: sections of prose, tables and charts; values only, no markup yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["SERIES", "Callout", "Chart", "Page", "Section", "Table", "Text", "series_color"]

SERIES = 8
"""How many colours for series a page has; `assets/page.css` gives each in light and in dark."""


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Callout:
    """An answer: one line, with a sign, and what stands behind it. `mood`: good, bad or plain."""

    head: str
    lines: tuple[str, ...] = ()
    mood: str = "plain"


@dataclass(frozen=True)
class Table:
    """Rows under a head. The first column names the row; `bold` are the numbers of marked rows."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    bold: frozenset[int] = frozenset()
    folded: bool = False
    """Shown when asked for: the numbers of a chart, for those who cannot see it."""


@dataclass(frozen=True)
class Chart:
    """A plot as plotly.js takes it, with colours by name (`series_color`), so that both schemes
    have their own.

    A trace may have `xs`, a table of x by name; the page then lets the reader choose which.
    """

    name: str
    title: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = field(default_factory=dict)
    caption: str = ""
    height: int = 320
    wide: bool = False
    """Takes the whole width of the page, where two others stand side by side."""


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading that can be linked to."""

    name: str
    title: str
    parts: tuple[Text | Callout | Table | Chart, ...]


@dataclass(frozen=True)
class Page:
    """All of it."""

    title: str
    subtitle: str
    sections: tuple[Section, ...]

    @property
    def charts(self) -> list[Chart]:
        """Every chart, in the order of the page."""
        return [
            part for section in self.sections for part in section.parts if isinstance(part, Chart)
        ]


def series_color(index: int) -> str:
    """The name of a series' colour; they come round again after `SERIES`.

    >>> series_color(0), series_color(9)
    ('--series-1', '--series-2')
    """
    return f"--series-{index % SERIES + 1}"
