"""The JSON of a benchmark as a table of all its measurements, with its times as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wholebatch.cli.report.page.elements import Chart, Section, Table, Text, series_color
from wholebatch.core.readable_sizes import bytes_said

__all__ = ["benchmarks"]

Row = Mapping[str, Any]


def benchmarks(found: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Section]:
    """Return one section for every file."""
    sections = []
    for at, (name, data) in enumerate(found):
        labels, rows = _rows(data)
        columns = list(dict.fromkeys(key for row in rows for key in row if _is_plain(row[key])))
        numbers = [key for key in columns if any(_is_number(row.get(key)) for row in rows)]
        parts: list[Any] = [Text(_about(data))]
        parts += [Text(str(note)) for note in data.get("notes", ())]
        shown = [key for key in numbers if _is_time(key)][:3]
        if shown:
            parts.append(_bars(f"benchmark-{at}", labels, rows, shown))
        parts.append(
            Table(
                ("", *(key.removesuffix("_bytes").replace("_", " ") for key in columns)),
                tuple(
                    (label, *(_said(key, row.get(key)) for key in columns))
                    for label, row in zip(labels, rows, strict=True)
                ),
            )
        )
        sections.append(Section(f"benchmark-of-{at}", f"Benchmark: {name}", tuple(parts)))
    return sections


def _rows(data: Mapping[str, Any]) -> tuple[list[str], list[Row]]:
    """Return the rows with their labels: the keys of `results`, or the texts in each of `rows`."""
    results = data.get("results")
    if isinstance(results, Mapping):
        items = [(str(name), row) for name, row in results.items() if isinstance(row, Mapping)]
        return [name for name, _ in items], [row for _, row in items]
    rows = [row for row in data.get("rows", ()) if isinstance(row, Mapping)]
    labels: list[str] = []
    rest: list[Row] = []
    for number, row in enumerate(rows, start=1):
        words = [key for key, value in row.items() if isinstance(value, str)][:2]
        said = ", ".join(str(row[key]) for key in words)
        if "micro" in row:
            said += f", micro-batch {row['micro']}"
        labels.append(said or str(number))
        rest.append({key: value for key, value in row.items() if key not in (*words, "micro")})
    return labels, rest


def _about(data: Mapping[str, Any]) -> str:
    nested = data.get("about")
    known = {**data, **(nested if isinstance(nested, Mapping) else {})}
    names = ("subject", "date", "device", "machine", "precision", "torch", "python", "threads")
    return ", ".join(f"{name} {known[name]}" for name in names if _is_plain(known.get(name)))


def _bars(name: str, labels: Sequence[str], rows: Sequence[Row], keys: Sequence[str]) -> Chart:
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": key.replace("_", " "),
            "y": list(labels),
            "x": [row.get(key) if _is_number(row.get(key)) else None for row in rows],
            "marker": {"color": series_color(at)},
            "hovertemplate": "%{x:.4g}",
        }
        for at, key in enumerate(keys)
    ]
    layout = {
        "barmode": "group",
        "xaxis": {"rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "type": "category", "showgrid": False},
        "hovermode": "closest",
        "showlegend": True,
    }
    height = 110 + len(labels) * (24 + 14 * len(keys))
    return Chart(name, "Times", traces, layout, height=height, wide=True)


def _is_time(key: str) -> bool:
    return key in ("ms", "seconds") or key.endswith(("_ms", "_seconds"))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float)


def _said(key: str, value: object) -> str:
    if value is None:
        return "–"
    if key.endswith("_bytes") and isinstance(value, int | float):
        return bytes_said(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value) if _is_plain(value) else "…"
