"""The results of `wholebatch tune`: the answer, all settings, and the split of the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wholebatch.cli.report.page.elements import Callout, Chart, Section, Table, Text, series_color
from wholebatch.cli.report.terminal_output import count_said
from wholebatch.core.readable_sizes import PARTS, bytes_said

__all__ = ["split", "tuning"]

Data = Mapping[str, Any]


def tuning(tunings: Sequence[tuple[str, Data]]) -> Section | None:
    """Return the recommendation, the reasons, and all measurements."""
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
                tuple(
                    _sentence(line) for line in (*bottleneck["evidence"], *tuned["accumulation"])
                ),
            )
        )
        measured = [trial for trial in tuned["trials"] if trial.get("units_per_second")]
        parts.append(_speeds(at, tuned, measured))
        parts.append(_trials(tuned))
        if tuned.get("ranks"):
            parts.append(_ranks(at, tuned["ranks"]))
    return Section("tuning", "Tuning", tuple(parts)) if parts else None


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


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
    """Return a table of settings by speed; those left out for the same reason share a row."""
    rows: list[tuple[str, ...]] = []
    bold = set()
    measured = [trial for trial in tuned["trials"] if trial.get("units_per_second")]
    for number, trial in enumerate(sorted(measured, key=lambda t: -t["units_per_second"])):
        if trial.get("recommended"):
            bold.add(number)
        rows.append(
            (
                str(trial["micro_batch"]),
                _way(trial),
                f"{count_said(trial['units_per_second'])} {tuned['unit']}/s",
                _peak(trial),
                trial["why"],
            )
        )
    left: dict[tuple[str, str], list[str]] = {}
    for trial in tuned["trials"]:
        if not trial.get("units_per_second"):
            left.setdefault((_way(trial), trial["why"]), []).append(str(trial["micro_batch"]))
    rows += [(", ".join(sizes), way, "–", "–", why) for (way, why), sizes in left.items()]
    head = ("micro-batch", "how", "speed", "peak memory", "")
    return Table(head, tuple(rows), "Every setting that was looked at.", frozenset(bold))


def _peak(trial: Data) -> str:
    if trial.get("peak"):
        return bytes_said(trial["peak"])
    return f"{bytes_said(trial['predicted'])} predicted" if trial.get("predicted") else "–"


def _ranks(at: int, ranks: Data) -> Chart:
    points = ranks["points"]
    x = [point["ranks"] for point in points]

    def trace(name: str, key: str, color: str) -> dict[str, Any]:
        single = points[0][key]
        return {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": x,
            "y": [100 * point[key] / (single * point["ranks"]) for point in points],
            "line": {"color": color, "width": 2, "dash": "dash"},
            "marker": {"color": color, "size": 8},
            "hovertemplate": "%{y:.1f}%",
        }

    traces = [
        trace("all that can overlap does", "units_per_second_overlapped", series_color(0)),
        trace("nothing overlaps", "units_per_second", series_color(1)),
    ]
    layout = {
        "xaxis": {
            "type": "log",
            "title": {"text": "ranks"},
            "tickvals": x,
            "ticktext": [str(n) for n in x],
        },
        "yaxis": {"title": {"text": "% of linear scaling"}, "range": [0, 105]},
    }
    return Chart(
        f"ranks-{at}",
        "A model, not a measurement: the tuned window on more ranks",
        traces,
        layout,
        ranks["said"],
        height=320,
        wide=True,
    )


def split(splits: Sequence[tuple[str, Mapping[str, float]]]) -> Section | None:
    """Return the split of a window's time: one bar for every setting or run, in milliseconds."""
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
        "▸ is the recommended setting." if any("▸" in name for name in names) else "",
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
