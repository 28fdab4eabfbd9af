"""The result of `wholebatch verify`: the answer, the distances, and the share of rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wholebatch.cli.report.page.elements import Callout, Chart, Section, Table, series_color

__all__ = ["verification"]

Data = Mapping[str, Any]
_SMALLEST = 1e-18  # Zero has no place on a logarithmic axis.


def verification(verdicts: Sequence[tuple[str, Data]]) -> Section | None:
    """Return every verdict, with its distances and their tolerances."""
    parts: list[Callout | Chart | Table] = []
    for at, (name, verdict) in enumerate(verdicts):
        parts.append(_answer(name, verdict))
        parts += _loop(at, verdict) if "trials" in verdict else _proof(at, verdict)
    return Section("verification", "Verification", tuple(parts)) if parts else None


def _answer(name: str, verdict: Data) -> Callout:
    same = bool(verdict["same"])
    head = f"{name}: {'the same update as' if same else 'not the update of'} the undivided batch"
    causes = tuple(
        f"{cause['kind']}: {cause['evidence']}. {cause['advice']}"
        for cause in verdict.get("causes", ())
    )
    notes = tuple(f"Note: {note}" for note in verdict.get("notes", ()))
    return Callout(head, (str(verdict["line"]), *causes, *notes), "good" if same else "bad")


def _proof(at: int, verdict: Data) -> list[Chart | Table]:
    rows = [
        verdict[name] for name in ("gradient", "update", "float64") if verdict.get(name) is not None
    ]
    chart = _distances(
        f"verdict-{at}",
        [row["what"] for row in rows],
        [row["distance"] for row in rows],
        [row["tolerance"] for row in rows],
    )
    lines = sorted(
        verdict["gradient"]["lines"],
        key=lambda line: -(line["distance"] or 0.0) / (line["floor"] or _SMALLEST),
    )[:12]
    table = Table(
        ("parameter", "numbers", "off by", "rounding alone"),
        tuple(
            (line["name"], f"{line['numbers']:,}", _said(line["distance"]), _said(line["floor"]))
            for line in lines
        ),
        "The gradients that are furthest off, by what rounding explains.",
        frozenset(n for n, line in enumerate(lines) if line["differs"]),
        folded=bool(verdict["same"]),
    )
    return [chart, table]


def _loop(at: int, verdict: Data) -> list[Chart | Table]:
    trials = verdict["trials"]
    right = [next(f for f in trial["fits"] if f["key"] == "right") for trial in trials]
    names = [f"{trial['case']}: {trial['name']}" for trial in trials]
    chart = _distances(
        f"verdict-{at}",
        names,
        [fit["distance"] for fit in right],
        [trial["tolerance"] for trial in trials],
    )
    table = Table(
        ("window", "optimizer steps", "off by", "found"),
        tuple(
            (name, str(trial["optimizer_steps"]), _said(fit["distance"]), _found(trial["found"]))
            for name, trial, fit in zip(names, trials, right, strict=True)
        ),
        "Every window that the loop was given.",
        frozenset(n for n, trial in enumerate(trials) if trial["found"] != "right"),
    )
    return [chart, table]


def _found(key: str | None) -> str:
    return "no known mistake fits" if key is None else key.replace("_", " ").replace("-", " ")


def _distances(
    name: str, labels: Sequence[str], distances: Sequence[float], tolerances: Sequence[float]
) -> Chart:
    """Return a chart of distances and tolerances on one logarithmic axis."""

    def points(what: str, values: Sequence[float], color: str, symbol: str) -> dict[str, Any]:
        width = 0 if symbol == "circle" else 3
        return {
            "type": "scatter",
            "mode": "markers",
            "name": what,
            "x": [max(value or 0.0, _SMALLEST) for value in values],
            "y": list(labels),
            "marker": {"color": color, "symbol": symbol, "size": 12, "line": {"width": width}},
            "hovertemplate": "%{x:.1e}",
        }

    layout = {
        "xaxis": {
            "type": "log",
            "title": {"text": "relative distance (L2)"},
            "exponentformat": "power",
        },
        "yaxis": {"autorange": "reversed", "type": "category", "showgrid": False},
        "hovermode": "closest",
    }
    traces = [
        points("off by", distances, series_color(0), "circle"),
        points("rounding explains up to", tolerances, series_color(1), "line-ns-open"),
    ]
    return Chart(
        name,
        "How far off, and what rounding explains",
        traces,
        layout,
        "Relative to the undivided batch; left of its mark is the same update.",
        height=150 + 34 * len(labels),
        wide=True,
    )


def _said(value: float | None) -> str:
    return "not finite" if value is None else "0" if value == 0 else f"{value:.1e}"
