"""The elements of a page, and the page as one self-contained HTML file.

The file needs no network, no other files, no fonts: it contains the plotting library (plotly.js,
from the Python package) and all data. A content security policy in the head forbids the browser to
load anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from wholebatch.errors import MissingExtraError, OptionError
from wholebatch.plain_files import finite, write_atomically

_SIGNS = {"good": "✓", "bad": "✗", "plain": "›"}
SERIES = 8
"""The number of series colours; `assets/page.css` defines each for light and dark."""


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str

    def html(self) -> str:
        return f"<p>{escape(self.text)}</p>"


@dataclass(frozen=True)
class Callout:
    """An answer: one line with a sign, and its details. `mood`: good, bad or plain."""

    head: str
    lines: tuple[str, ...] = ()
    mood: str = "plain"

    def html(self) -> str:
        lines = "".join(f"<p>{escape(line)}</p>" for line in self.lines)
        sign = f'<span class="sign" aria-hidden="true">{_SIGNS[self.mood]}</span>'
        head = f"<p>{sign}<strong>{escape(self.head)}</strong></p>"
        return f'<div class="callout {self.mood}">{head}{lines}</div>'


@dataclass(frozen=True)
class Table:
    """Rows under a head. The first column labels the row.

    `bold` and `wrong` hold the indices of rows that are marked, and of those in red.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    bold: frozenset[int] = frozenset()
    wrong: frozenset[int] = frozenset()
    folded: bool = False
    """Folded until opened: the numbers of a chart, for those who cannot see it."""

    def html(self) -> str:
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in self.head)
        rows = []
        for number, row in enumerate(self.rows):
            first, *others = row
            cells = f'<th scope="row">{escape(first)}</th>'
            cells += "".join(f"<td>{escape(cell)}</td>" for cell in others)
            kinds = [name for name in ("bold", "wrong") if number in getattr(self, name)]
            mark = f' class="{" ".join(kinds)}"' if kinds else ""
            rows.append(f"<tr{mark}>{cells}</tr>")
        caption = f"<caption>{escape(self.caption)}</caption>" if self.caption else ""
        inside = "".join(rows)
        made = (
            '<div class="scroll" tabindex="0"><table>'
            f"{caption}<thead><tr>{head}</tr></thead><tbody>{inside}</tbody></table></div>"
        )
        if self.folded:
            return f"<details><summary>the numbers</summary>{made}</details>"
        return made


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

    def html(self) -> str:
        caption = f"<p>{escape(self.caption)}</p>" if self.caption else ""
        wide = " wide" if self.wide else ""
        return (
            f'<figure class="chart{wide}"><figcaption><h3>{escape(self.title)}</h3>{caption}'
            f'</figcaption><div class="plot" id="{escape(self.name)}" role="img" '
            f'aria-label="{escape(self.title)}" style="height:{self.height}px"></div></figure>'
        )


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading that can be linked to."""

    name: str
    title: str
    parts: tuple[Text | Callout | Table | Chart, ...]

    def html(self) -> str:
        parts: list[str] = []
        in_grid = False
        for part in self.parts:
            narrow = isinstance(part, Chart) and not part.wide
            if narrow != in_grid:  # Consecutive narrow charts stand side by side.
                parts.append('<div class="grid">' if narrow else "</div>")
                in_grid = narrow
            parts.append(part.html())
        if in_grid:
            parts.append("</div>")
        chooser = self._axes()
        head = f"<h2>{escape(self.title)}</h2>{chooser}"
        inside = "\n".join(parts)
        return (
            f'<section id="{escape(self.name)}"><div class="head">{head}</div>\n{inside}</section>'
        )

    def _axes(self) -> str:
        """Return buttons to choose the x axis, if the charts of a section offer more than one."""
        names: list[str] = []
        for part in self.parts:
            if isinstance(part, Chart):
                for trace in part.data:
                    names += [name for name in trace.get("xs", ()) if name not in names]
        if len(names) < 2:
            return ""
        buttons = "".join(
            f'<button type="button" data-axis="{escape(name)}" aria-pressed="{pressed}">'
            f"{escape(name)}</button>"
            for name, pressed in zip(names, ("true", *["false"] * len(names)), strict=False)
        )
        return f'<div class="axes" role="group" aria-label="along the x axis">{buttons}</div>'


@dataclass(frozen=True)
class HtmlPage:
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


_ASSETS = Path(__file__).parent / "assets"


def curve(name: str, x: Any, y: Any, color: str, **more: Any) -> dict[str, Any]:
    """Return a trace of points joined by a line."""
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": x,
        "y": y,
        "line": {"color": color, "width": 2},
        "marker": {"color": color, "size": 8},
        **more,
    }


def bars(name: str, x: Any, y: Any, color: str, **more: Any) -> dict[str, Any]:
    """Return a trace of bars; with an edge, those of a stack are told apart."""
    marker = {"color": color, "line": {"color": "--surface", "width": 1}}
    return {"type": "bar", "name": name, "x": x, "y": y, "marker": marker, **more}


def axis(text: str, **more: Any) -> dict[str, Any]:
    """Return an axis with a title."""
    return {"title": {"text": text}, **more}


def by_row(xaxis: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return the layout of a chart with a named row for each bar or point, from the top down."""
    rows = {"autorange": "reversed", "type": "category", "showgrid": False}
    return {"xaxis": xaxis, "yaxis": rows, "hovermode": "closest", **more}


def write_page(page: HtmlPage, path: Path) -> Path:
    """Write the page and return its path; create missing folders."""
    write_atomically(path, render(page), OptionError)
    return path


def render(page: HtmlPage) -> str:
    """Return the whole file as text."""
    charts = {
        chart.name: {
            "data": [_plain(dict(trace)) for trace in chart.data],
            "layout": _plain(dict(chart.layout)),
            "height": chart.height,
        }
        for chart in page.charts
    }
    if len(charts) != len(page.charts):
        raise ValueError("two charts of a page have the same name")
    links = "".join(
        f'<a href="#{escape(section.name)}">{escape(section.title)}</a>'
        for section in page.sections
    )
    body = "\n".join(section.html() for section in page.sections)
    plotting = f"<script>{_plotly()}</script>" if charts else ""
    return Template(_asset("page.html")).substitute(
        title=escape(page.title),
        subtitle=escape(page.subtitle),
        links=links,
        style=_asset("page.css"),
        body=body,
        # Safe inside a script element.
        charts=json.dumps(finite(charts), allow_nan=False, separators=(",", ":")).replace(
            "<", "\\u003c"
        ),
        plotting=plotting,
        script=_asset("page.js"),
    )


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MissingExtraError("plotly", "report", "the HTML page") from None
    return str(get_plotlyjs())


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _plain(value: Any) -> Any:
    """Escape all text: plotly would treat `<b>` in the name of a run as markup."""
    if isinstance(value, str):
        return value.replace("&", "&amp;").replace("<", "&lt;")
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
