"""What `wholebatch tune` measured: the answer, settings side by side, where the time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wholebatch.report.page.elements import Callout, Chart, Section, Table, Text, series_color
from wholebatch.report.terminal import bytes_said, count_said

__all__ = ["PARTS", "split", "tuning"]

PARTS = (
    "data",
    "forward",
    "backward",
    "micro-step",
    "addition",
    "communication",
    "optimizer",
    "idle",
)
"""Where a window's time goes, in the order of a window. "micro-step" is forward and backward where
they run as one."""

Data = Mapping[str, Any]


def tuning(tunings: Sequence[tuple[str, Data]]) -> Section | None:
    """The recommendation, why, and everything that was measured on the way to it."""
    parts: list[Any] = []
    for at, (name, tuned) in enumerate(tunings):
        bottleneck = tuned["bottleneck"]
        parts.append(
            Callout(
                f"{tuned.get('subject') or name}: {tuned['advice'][0]}", tuple(tuned["advice"][1:])
            )
        )
        parts.append(
            Callout(
                f"Bottleneck: {bottleneck['kind']}",
                (*bottleneck["evidence"], *tuned["accumulation"]),
            )
        )
        measured = [trial for trial in tuned["trials"] if trial.get("units_per_second")]
        parts.append(_speeds(at, tuned, measured))
        parts.append(_trials(tuned))
        if tuned.get("ranks"):
            parts.append(_ranks(at, tuned["ranks"], tuned["unit"]))
    return Section("tuning", "Tuning", tuple(parts)) if parts else None


def _way(trial: Data) -> str:
    words = [trial["precision"]]
    words += ["checkpointed"] if trial["checkpointing"] else []
    words += [trial["execute"]]
    words += [trial["sync"]] if trial.get("sync") not in (None, "single", "auto") else []
    return ", ".join(words)


def _speeds(at: int, tuned: Data, measured: Sequence[Data]) -> Chart:
    traces: list[dict[str, Any]] = []
    for number, way in enumerate(dict.fromkeys(_way(trial) for trial in measured)):
        ours = sorted(
            (trial for trial in measured if _way(trial) == way), key=lambda t: t["micro_batch"]
        )
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": way,
                "x": [trial["micro_batch"] for trial in ours],
                "y": [trial["units_per_second"] for trial in ours],
                "line": {"color": series_color(number), "width": 2},
                "marker": {"color": series_color(number), "size": 8},
            }
        )
    best = next((t for t in measured if t.get("recommended")), None)
    if best is not None:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "recommended",
                "x": [best["micro_batch"]],
                "y": [best["units_per_second"]],
                "marker": {
                    "symbol": "circle-open",
                    "size": 18,
                    "color": "--text",
                    "line": {"width": 2},
                },
            }
        )
    sizes = sorted({trial["micro_batch"] for trial in measured})
    layout = {
        "xaxis": {
            "type": "log",
            "title": {"text": "micro-batch, samples"},
            "tickvals": sizes,
            "ticktext": [str(size) for size in sizes],
        },
        "yaxis": {"title": {"text": f"{tuned['unit']} per second"}, "rangemode": "tozero"},
        "showlegend": True,
    }
    caption = f"Batch of {tuned['batch_size']} samples, {tuned['device']}."
    return Chart(
        f"tune-{at}", "Speed over micro-batch size", traces, layout, caption, height=360, wide=True
    )


def _trials(tuned: Data) -> Table:
    rows = []
    bold = set()
    ordered = sorted(tuned["trials"], key=lambda t: -(t.get("units_per_second") or 0.0))
    for number, trial in enumerate(ordered):
        rate, peak = trial.get("units_per_second"), trial.get("peak")
        if trial.get("recommended"):
            bold.add(number)
        rows.append(
            (
                str(trial["micro_batch"]),
                _way(trial),
                f"{count_said(rate)} {tuned['unit']}/s" if rate else "–",
                bytes_said(peak) if peak else "–",
                trial["why"],
            )
        )
    head = ("micro-batch", "how", "speed", "peak memory", "")
    return Table(head, tuple(rows), "Every setting that was looked at.", frozenset(bold))


def _ranks(at: int, ranks: Data, unit: str) -> Chart:
    points = ranks["points"]
    x = [point["ranks"] for point in points]

    def trace(name: str, values: Sequence[float], color: str, dash: str) -> dict[str, Any]:
        return {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": x,
            "y": list(values),
            "line": {"color": color, "width": 2, "dash": dash},
            "marker": {"color": color, "size": 8},
        }

    single = points[0]["units_per_second"]
    traces = [
        trace("model", [p["units_per_second"] for p in points], series_color(0), "solid"),
        trace("if communication were free", [single * n for n in x], series_color(1), "dot"),
    ]
    layout = {
        "xaxis": {
            "type": "log",
            "title": {"text": "ranks"},
            "tickvals": x,
            "ticktext": [str(n) for n in x],
        },
        "yaxis": {"title": {"text": f"{unit} per second"}, "rangemode": "tozero"},
    }
    return Chart(
        f"ranks-{at}",
        "A model, not a measurement: the same batch per rank on more ranks",
        traces,
        layout,
        ranks["said"],
        height=340,
        wide=True,
    )


def split(splits: Sequence[tuple[str, Mapping[str, float]]]) -> Section | None:
    """Where a window's time goes: one bar for every setting or run, in milliseconds."""
    if not splits:
        return None
    names = [name for name, _ in splits]
    traces = []
    for number, part in enumerate(PARTS):
        values = [1000 * seconds.get(part, 0.0) for _, seconds in splits]
        if not any(values):
            continue
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": part,
                "y": names,
                "x": values,
                "marker": {
                    "color": series_color(number),
                    "line": {"color": "--surface", "width": 1},
                },
                "hovertemplate": "%{x:.3g} ms",
            }
        )
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "milliseconds of a window"}},
        "yaxis": {"autorange": "reversed", "type": "category", "showgrid": False},
        "hovermode": "closest",
    }
    chart = Chart(
        "split",
        "Where the time of a window goes",
        traces,
        layout,
        height=170 + 44 * len(names),
        wide=True,
    )
    rows = tuple(
        (name, *(f"{1000 * seconds.get(part, 0.0):.2f}" for part in PARTS))
        for name, seconds in splits
    )
    numbers = Table(("milliseconds", *PARTS), rows, folded=True)
    text = Text(
        "Addition is the time by which adding into the gradients lengthens a backward; idle is "
        "what no part accounts for."
    )
    return Section("time", "Time split", (chart, numbers, text))
