"""The elements of a page: sections of text, tables and charts, as values without markup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["SERIES", "Callout", "Chart", "Page", "Section", "Table", "Text", "series_color"]

SERIES = 8
"""The number of series colours; `assets/page.css` defines each for light and dark."""


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Callout:
    """An answer: one line with a sign, and its details. `mood`: good, bad or plain."""

    head: str
    lines: tuple[str, ...] = ()
    mood: str = "plain"


@dataclass(frozen=True)
class Table:
    """Rows under a head. The first column labels the row; `bold` holds the indices of bold rows."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    bold: frozenset[int] = frozenset()
    folded: bool = False
    """Folded until opened: the numbers of a chart, for those who cannot see it."""


@dataclass(frozen=True)
class Chart:
    """A plot for plotly.js, with colours by name (`series_color`) for the light and dark scheme.

    A trace may have `xs`, a table of x values by name; the reader of the page then chooses one.
    """

    name: str
    title: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = field(default_factory=dict)
    caption: str = ""
    height: int = 320
    wide: bool = False
    """True to take the whole width of the page instead of half."""


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading that can be linked to."""

    name: str
    title: str
    parts: tuple[Text | Callout | Table | Chart, ...]


@dataclass(frozen=True)
class Page:
    """The whole page."""

    title: str
    subtitle: str
    sections: tuple[Section, ...]

    @property
    def charts(self) -> list[Chart]:
        """Return every chart, in the order of the page."""
        return [
            part for section in self.sections for part in section.parts if isinstance(part, Chart)
        ]


def series_color(index: int) -> str:
    """Return the name of a series' colour; the colours repeat after `SERIES`.

    >>> series_color(0), series_color(9)
    ('--series-1', '--series-2')
    """
    return f"--series-{index % SERIES + 1}"
