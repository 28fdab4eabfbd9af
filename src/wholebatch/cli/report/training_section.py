"""Runs over time and side by side: loss, throughput, memory, gradient norm, learning rate."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from wholebatch.cli.report.html_page import Chart, Section, Table, Text, axis, series_color
from wholebatch.cli.report.page_sources import TrainingRun
from wholebatch.cli.report.result_sections import scale_of
from wholebatch.cli.report.terminal_output import short_count, short_duration
from wholebatch.readable_sizes import bytes_said

MOST_BARS = 60
"""The most points of a curve that are drawn with their intervals."""
MOST_POINTS = 800
"""The most points of a curve; longer runs are shown by means over stretches."""

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")  # for those who see no colours
_PLACE = {"updates": "update", "epochs": "epoch", "tokens": "token"}
Record = dict[str, Any]


def training(runs: Sequence[TrainingRun], units: Sequence[str]) -> Section | None:
    """Return charts over the windows of every run; `units` are the names of their units."""
    shown = [(run, unit) for run, unit in zip(runs, units, strict=True) if run.records]
    if not shown:
        return None
    unit = shown[0][1] if len({unit for _, unit in shown}) == 1 else "units"
    peaks = [peak for run, _ in shown for peak in _numbers(run, "memory")]
    size, size_name = scale_of(max(peaks, default=0.0))
    zero: dict[str, Any] = {"rangemode": "tozero"}
    chart = partial(_chart, shown)
    charts = [
        chart("loss", "Loss", axis("mean over the window's units"), _field("loss")),
        chart(
            "throughput",
            "Throughput",
            axis(f"{unit} per second", **zero),
            _field("units_per_second"),
        ),
        chart(
            "memory-over-time",
            "Memory",
            axis(f"peak, {size_name}", **zero),
            lambda r: None if (peak := _number(r.get("memory"))) is None else peak / size,
        ),
        chart("grad-norm", "Gradient norm", axis("before clipping"), _field("grad_norm")),
        chart("rate", "Learning rate", axis("", **zero), _field("lr")),
        chart(
            "noise",
            "Critical batch by the gradient noise scale",
            axis(f"{unit}, with the 95% interval", type="log"),
            _field("noise_scale"),
            bounds=("noise_low", "noise_high"),
        ),
    ]
    long = max(len(run.records) for run, _ in shown)
    note = Text(f"Curves of more than {MOST_POINTS} windows show means of stretches.")
    shown_charts = [c for c in charts if c is not None]
    return Section("training", "Over time", (*shown_charts, *([note] * (long > MOST_POINTS))))


def _field(name: str) -> Callable[[Record], Any]:
    """Return a function that reads a field; of several parameter groups the first one's."""

    def read(record: Record) -> Any:
        value = record.get(name)
        return value[0] if isinstance(value, list) and value else value

    return read


def _chart(
    shown: Sequence[tuple[TrainingRun, str]],
    name: str,
    title: str,
    y_axis: dict[str, Any],
    value: Callable[[Record], Any],
    *,
    bounds: tuple[str, str] | None = None,
) -> Chart | None:
    """Return one curve for every run; with `bounds`, only through windows with a value."""
    traces = []
    for place, (run, unit) in enumerate(shown):
        ys = [_number(value(record)) for record in run.records]
        if any(y is not None for y in ys):
            line = {"color": series_color(place), "dash": _DASHES[place % len(_DASHES)]}
            traces.append(_trace(run, unit, ys, line, bounds))
    if not traces:
        return None
    if bounds is None:
        y_axis = {"rangemode": "normal", **y_axis}
    else:  # An interval may end at ten times the value.
        y_axis = {**y_axis, **_ticks(traces)}
    return Chart(name, title, traces, {"yaxis": y_axis, "showlegend": len(shown) > 1})


def _trace(
    run: TrainingRun,
    unit: str,
    ys: Sequence[float | None],
    line: dict[str, str],
    bounds: tuple[str, str] | None,
) -> dict[str, Any]:
    """Return the curve of one run, with a choice of x axes and, if short, its intervals."""
    along = _along(run.records, unit)
    known = [at for at, y in enumerate(ys) if y is not None] if bounds else range(len(ys))
    columns = thinned([[column[at] for at in known] for column in (*along.values(), ys)])
    trace = {
        "type": "scatter",
        "mode": "lines" if len(columns[-1]) > 40 else "lines+markers",
        "name": run.name,
        "xs": dict(zip(along, columns, strict=False)),
        "y": columns[-1],
        "line": {**line, "width": 2},
        "marker": {"size": 6, "color": line["color"]},
        "connectgaps": False,
    }
    if bounds is not None and len(columns[-1]) <= MOST_BARS:
        ends = [[_number(run.records[at].get(name)) for at in known] for name in bounds]
        trace["error_y"] = _bars(columns[-1], *ends, color=line["color"])
    return trace


def _ticks(traces: Sequence[Record]) -> dict[str, str]:
    """Return ticks at 2, 5 and 10 of every decade, if the axis spans one; else plotly's own."""
    ends = [y for trace in traces for y in trace["y"] if y]
    for trace in traces:
        bars = trace.get("error_y", {})
        steps = zip(trace["y"], bars.get("array", ()), bars.get("arrayminus", ()), strict=False)
        ends += [end for y, up, down in steps if y for end in (y + up, y - down) if end > 0]
    return {"dtick": "D2"} if ends and max(ends) >= 10 * min(ends) else {}


def _bars(
    ys: Sequence[float | None],
    lows: Sequence[float | None],
    highs: Sequence[float | None],
    *,
    color: str,
) -> dict[str, Any]:
    """Return the interval of every point; an open end is not drawn."""

    def between(ends: Sequence[float | None]) -> list[float]:
        pairs = zip(ys, ends, strict=True)
        return [0.0 if y is None or end is None else abs(end - y) for y, end in pairs]

    return {
        "type": "data",
        "symmetric": False,
        "array": between(highs),
        "arrayminus": between(lows),
        "color": color,
        "thickness": 1,
        "width": 3,
    }


def _along(records: Sequence[Record], unit: str) -> dict[str, list[float | None]]:
    """Return the choices for the x axis: windows, units seen, time spent in windows."""
    units = list(itertools.accumulate(_number(r.get("units")) or 0.0 for r in records))
    seconds = itertools.accumulate(_number(r.get("seconds")) or 0.0 for r in records)
    return {
        "window": [float(record["window"]) for record in records],
        f"{unit} seen": [*units],
        "minutes of training": [second / 60 for second in seconds],
    }


def thinned(columns: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
    """Return the columns with at most `MOST_POINTS` rows, each the mean of a stretch."""
    length = len(columns[0])
    if length <= MOST_POINTS:
        return [list(column) for column in columns]
    step = math.ceil(length / MOST_POINTS)
    return [
        [_mean(column[start : start + step]) for start in range(0, length, step)]
        for column in columns
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


# --- side by side -----------------------------------------------------------------------------


def overview(
    runs: Sequence[TrainingRun], units: Sequence[str], verdicts: dict[str, dict[str, Any]]
) -> Section | None:
    """Return a table with the runs as columns; rows in which they differ are marked."""
    if not runs:
        return None
    others = _other_settings(runs)
    columns = [
        {
            **_settings_of(run),
            **{name.replace("_", " "): _setting(run, name) for name in others},
            **_results_of(run, unit, verdicts.get(run.name)),
            "versions": _versions(run),
        }
        for run, unit in zip(runs, units, strict=True)
    ]
    made = {label: [column[label] for column in columns] for label in columns[0]}
    if set(made["losses that are not finite"]) == {"0"}:
        del made["losses that are not finite"]
    rows = [(label, *cells) for label, cells in made.items() if not set(cells) <= {"", "–"}]
    marked = frozenset(place for place, (_, *cells) in enumerate(rows) if len(set(cells)) > 1)
    head = ("", *(run.name for run in runs))
    caption = "What differs between the runs is in bold." if len(runs) > 1 else ""
    return Section("runs", "At a glance", (Table(head, tuple(rows), caption, marked),))


def _settings_of(run: TrainingRun) -> dict[str, str]:
    ranks = run.config.get("ranks", 1)
    return {
        "recipe": str(run.config.get("recipe", "–")),
        "batch": _batch_text(run),
        "precision": _setting(run, "precision"),
        "clipped to norm": _setting(run, "clip_norm"),
        "learning rate": _rate_text(run),
        "seed": _setting(run, "seed"),
        "device": f"{run.config.get('device', '–')}" + (f" × {ranks} ranks" if ranks != 1 else ""),
    }


_IN_OVERVIEW = frozenset({"batch_size", "micro_batch", "precision", "clip_norm", "lr", "seed"})


def _other_settings(runs: Sequence[TrainingRun]) -> list[str]:
    """Return the names of the settings in which the runs differ, beyond those always shown."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [
        name
        for name in names
        if name not in _IN_OVERVIEW and len({_setting(run, name) for run in runs}) > 1
    ]


def _rate_text(run: TrainingRun) -> str:
    """Return the learning rate as the windows had it: first → last, where it changed."""
    rate = _field("lr")
    rates = [value for r in run.records if (value := _number(rate(r))) is not None]
    if not rates:
        return _setting(run, "lr")
    ends = dict.fromkeys(f"{value:.3g}" for value in (rates[0], rates[-1]))
    return " → ".join(ends)


def _results_of(run: TrainingRun, unit: str, verdict: Record | None) -> dict[str, str]:
    losses, rates = _numbers(run, "loss"), _numbers(run, "units_per_second")
    peaks = _numbers(run, "memory")
    lost = [r for r in run.records if _number(r.get("loss")) is None and r.get("units") != 0]
    recovered = [r["recoveries"] for r in run.records if isinstance(r.get("recoveries"), int)]
    verified = "–" if verdict is None else "✗ another update"
    return {
        "windows": f"{len(run.records):,} of {_setting(run, 'steps')}",
        "loss, first → last": f"{losses[0]:.4f} → {losses[-1]:.4f}" if losses else "–",
        "losses that are not finite": str(len(lost)),
        "speed (median)": f"{short_count(statistics.median(rates))} {unit}/s" if rates else "–",
        "peak memory": bytes_said(max(peaks)) if peaks else "–",
        "time in windows": short_duration(sum(_numbers(run, "seconds"))),
        "skipped windows": str(sum(bool(record.get("skipped")) for record in run.records)),
        "recoveries from out of memory": str(max(recovered)) if recovered else "–",
        "verified": "✓ the same update" if verdict is not None and verdict["same"] else verified,
    }


def _versions(run: TrainingRun) -> str:
    known = [(name, run.config.get(name)) for name in ("wholebatch", "torch", "python")]
    return ", ".join(f"{name} {version}" for name, version in known if version)


def _batch_text(run: TrainingRun) -> str:
    arithmetic = run.manifest.get("arithmetic")
    if isinstance(arithmetic, list):  # The batch size changes during the run.
        place = _PLACE.get(arithmetic[0].get("by", ""), "")
        sizes = ", ".join(f"{one['global_batch']} from {one['from']:,}" for one in arithmetic)
        return f"samples by {place}: {sizes}; micro-batch {arithmetic[0]['micro_batch']}"
    text = (arithmetic or {}).get("said")
    if isinstance(text, str):
        return f"{text} samples"
    size, micro = run.settings.get("batch_size"), run.settings.get("micro_batch")
    made = [r["micro_batches"] for r in run.records if isinstance(r.get("micro_batches"), int)]
    steps = f", {round(statistics.median(made))} a window" if made else ""
    return f"{size} samples, micro-batch {micro}{steps}"


def _setting(run: TrainingRun, name: str) -> str:
    value = run.settings.get(name)
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _numbers(run: TrainingRun, name: str) -> list[float]:
    return [value for r in run.records if (value := _number(r.get(name))) is not None]
