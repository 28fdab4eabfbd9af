"""The sections of a page that show results: memory, tuning, verification, benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wholebatch.cli.report.html_page import (
    Callout,
    Chart,
    Section,
    Table,
    Text,
    axis,
    bars,
    by_row,
    curve,
    series_color,
)
from wholebatch.cli.report.terminal_output import short_count
from wholebatch.readable_sizes import CATEGORIES, PARTS, bytes_said

Data = Mapping[str, Any]


def memory(plans: Sequence[tuple[str, Data]]) -> Section | None:
    """Return one stacked chart for each plan, with its budget as a line."""
    parts: list[Chart | Table | Text] = []
    for at, (name, plan) in enumerate(plans):
        points = plan["points"]
        if not points:
            continue
        by = f", by {plan['by']}" if plan.get("by") else ""
        title = f"Peak of a step by category: {plan.get('subject') or name}{by}"
        chosen = plan.get("micro_batch")
        text = f" Micro-batch {chosen} is the one to take." if chosen else ""
        caption = f"Predicted, {plan.get('precision', 'full')} precision.{text}"
        parts.append(_chart(f"memory-{at}", title, caption, points, plan.get("budget")))
        parts.append(_numbers(points))
    return Section("memory", "Memory over micro-batch size", tuple(parts)) if parts else None


def _chart(
    name: str, title: str, caption: str, points: Sequence[Data], budget: int | None
) -> Chart:
    sizes = [str(point["micro_batch"]) for point in points]
    highest = max(point["peak"] for point in points)
    scale, unit = scale_of(highest)
    hover = f"%{{y:.3g}} {unit}"
    traces: list[dict[str, Any]] = []
    for at, category in enumerate(CATEGORIES):
        values = [point["by_category"].get(category, 0) / scale for point in points]
        if max(values) * 200 < highest / scale:
            continue  # Too small to see.
        traces.append(bars(category, sizes, values, series_color(at), hovertemplate=hover))
    # A budget far above would flatten everything else.
    if budget is not None and budget < 3 * highest:
        traces.append(
            curve(
                "budget",
                sizes,
                [budget / scale] * len(sizes),
                "--text",
                mode="lines" if len(sizes) > 1 else "lines+markers",  # One point gives no line.
                line={"color": "--text", "width": 2, "dash": "dash"},
                marker={"color": "--text", "symbol": "line-ew-open", "size": 40},
                hovertemplate=hover,
            )
        )
        if min(point["peak"] for point in points) > budget:
            caption += f" Nothing fits into the budget of {bytes_said(budget)}."
    elif budget is not None:
        caption += f" The budget of {bytes_said(budget)} is far above."
    layout = {
        "barmode": "stack",
        "bargap": 0.25 if len(sizes) > 2 else 0.7,
        "xaxis": axis("micro-batch, samples", type="category", showgrid=False),
        "yaxis": axis(unit, rangemode="tozero"),
    }
    return Chart(name, title, traces, layout, caption, height=380, wide=True)


def scale_of(most: float) -> tuple[float, str]:
    """Return the divisor and the unit for byte values up to `most`."""
    for size, unit in ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")):
        if most >= size:
            return size, unit
    return 1.0, "bytes"


def _numbers(points: Sequence[Data]) -> Table:
    shown = [name for name in CATEGORIES if any(p["by_category"].get(name) for p in points)]
    rows = tuple(
        (
            str(point["micro_batch"]),
            bytes_said(point["peak"]),
            *(bytes_said(point["by_category"].get(name, 0)) for name in shown),
        )
        for point in points
    )
    return Table(("micro-batch", "peak", *shown), rows, folded=True)


def tuning(tunings: Sequence[tuple[str, Data]]) -> Section | None:
    """Return the recommendation, the reasons, and all measurements."""
    parts: list[Any] = []
    for at, (name, tuned) in enumerate(tunings):
        bottleneck, (answer, *more) = tuned["bottleneck"], tuned["advice"]
        helps = [f"What helps: {bottleneck['remedy']}"] if "remedy" in bottleneck else []
        said = (*helps, *bottleneck["evidence"], *tuned["accumulation"])
        sentences = (f"{line[:1].upper()}{line[1:].removesuffix('.')}." for line in said)
        parts += [
            Callout(f"{tuned.get('subject') or name}: {answer}", tuple(more)),
            Callout(f"Bottleneck: {bottleneck['kind']}", tuple(sentences)),
            _speeds(at, tuned),
            _trials(tuned),
        ]
        if tuned.get("ranks"):
            parts.append(_ranks(at, tuned["ranks"]))
    return Section("tuning", "Tuning", tuple(parts)) if parts else None


def way(trial: Data) -> str:
    """Return how a setting runs its micro-batches, in a few words."""
    words = [trial["precision"]]
    words += ["checkpointed"] if trial["checkpointing"] else []
    words += [trial["execute"]]
    words += [trial["sync"]] if trial.get("sync") not in (None, "single", "auto") else []
    return ", ".join(words)


def _speeds(at: int, tuned: Data) -> Chart:
    measured = [trial for trial in tuned["trials"] if trial.get("units_per_second")]
    traces: list[dict[str, Any]] = []
    for number, how in enumerate(dict.fromkeys(map(way, measured))):
        ours = sorted((t for t in measured if way(t) == how), key=lambda t: t["micro_batch"])
        x = [trial["micro_batch"] for trial in ours]
        y = [trial["units_per_second"] for trial in ours]
        traces.append(curve(how, x, y, series_color(number)))
    best = next((t for t in measured if t.get("recommended")), None)
    if best is not None:
        ring = {"symbol": "circle-open", "size": 18, "color": "--text", "line": {"width": 2}}
        x, y = [best["micro_batch"]], [best["units_per_second"]]
        traces.append(curve("recommended", x, y, "--text", mode="markers", marker=ring))
    sizes = sorted({trial["micro_batch"] for trial in measured})
    layout = {
        "xaxis": _log_axis("micro-batch, samples", sizes),
        "yaxis": axis(f"{tuned['unit']} per second", rangemode="tozero"),
        "showlegend": True,
    }
    caption = f"Batch of {tuned['batch_size']} samples, {tuned['device']}."
    return Chart(
        f"tune-{at}", "Speed over micro-batch size", traces, layout, caption, height=360, wide=True
    )


def _log_axis(text: str, values: Sequence[int]) -> dict[str, Any]:
    """Return a logarithmic axis with a tick at every value."""
    return axis(text, type="log", tickvals=values, ticktext=[str(value) for value in values])


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
                way(trial),
                f"{short_count(trial['units_per_second'])} {tuned['unit']}/s",
                _peak(trial),
                trial["why"],
            )
        )
    left: dict[tuple[str, str], list[str]] = {}
    for trial in tuned["trials"]:
        if not trial.get("units_per_second"):
            left.setdefault((way(trial), trial["why"]), []).append(str(trial["micro_batch"]))
    rows += [(", ".join(sizes), how, "–", "–", why) for (how, why), sizes in left.items()]
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
        y = [100 * point[key] / (single * point["ranks"]) for point in points]
        line = {"color": color, "width": 2, "dash": "dash"}
        return curve(name, x, y, color, line=line, hovertemplate="%{y:.1f}%")

    traces = [
        trace("all that can overlap does", "units_per_second_overlapped", series_color(0)),
        trace("nothing overlaps", "units_per_second", series_color(1)),
    ]
    layout = {"xaxis": _log_axis("ranks", x), "yaxis": axis("% of linear scaling", range=[0, 105])}
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
        color = series_color(number)
        hover = "%{x:.3g} ms"
        traces.append(bars(part, values, names, color, orientation="h", hovertemplate=hover))
    layout = by_row(axis("milliseconds of a window"), barmode="stack")
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
            (
                line["name"],
                f"{line['numbers']:,}",
                _distance(line["distance"]),
                _distance(line["floor"]),
            )
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
            (
                name,
                str(trial["optimizer_steps"]),
                _distance(fit["distance"]),
                (trial["found"] or "no known mistake fits").replace("_", " ").replace("-", " "),
            )
            for name, trial, fit in zip(names, trials, right, strict=True)
        ),
        "Every window that the loop was given.",
        frozenset(n for n, trial in enumerate(trials) if trial["found"] != "right"),
    )
    return [chart, table]


def _distances(
    name: str, labels: Sequence[str], distances: Sequence[float], tolerances: Sequence[float]
) -> Chart:
    """Return a chart of distances and tolerances on one logarithmic axis."""

    def points(what: str, values: Sequence[float], color: str, symbol: str) -> dict[str, Any]:
        width = 0 if symbol == "circle" else 3
        mark = {"color": color, "symbol": symbol, "size": 12, "line": {"width": width}}
        x = [max(value or 0.0, _SMALLEST) for value in values]
        hover = "%{x:.1e}"
        return curve(what, x, [*labels], color, mode="markers", marker=mark, hovertemplate=hover)

    layout = by_row(axis("relative distance (L2)", type="log", exponentformat="power"))
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


def _distance(value: float | None) -> str:
    return "not finite" if value is None else "0" if value == 0 else f"{value:.1e}"


def learning(found: Sequence[tuple[str, Data]]) -> Section | None:
    """Return the curves of runs beside each other, with their table and what they say."""
    parts: list[Any] = []
    for at, (_, data) in enumerate(found):
        head, *more = data["advice"]
        traces = [
            curve(one["name"], one["x"], one["y"], series_color(place), mode="lines")
            for place, one in enumerate(data["curves"])
        ]
        scale = {"type": "log"} if data.get("log_x") else {}
        layout = {"xaxis": axis(data["x"], **scale), "yaxis": axis(data["y"])}
        parts += [
            Callout(head, tuple(more)),
            Chart(f"learning-{at}", data["title"], traces, layout, wide=True),
        ]
        if data["rows"]:
            keys = list(data["rows"][0])
            rows = tuple(tuple(_cell(key, row[key]) for key in keys) for row in data["rows"])
            parts.append(Table(tuple(keys), rows))
    return Section("learning", "Learning", tuple(parts)) if parts else None


def benchmarks(found: Sequence[tuple[str, Data]]) -> list[Section]:
    """Return one section for every file."""
    sections = []
    for at, (name, data) in enumerate(found):
        labels, rows = _rows(data)
        columns = list(dict.fromkeys(key for row in rows for key in row if _is_plain(row[key])))
        wrong = frozenset(place for place, row in enumerate(rows) if row.get("is_wrong"))
        numbers = [key for key in columns if any(_is_number(row.get(key)) for row in rows)]
        parts: list[Any] = [Text(_about(data))]
        parts += [Text(str(note)) for note in data.get("notes", ())]
        times = ("ms", "seconds")
        shown = [key for key in numbers if key.rpartition("_")[2] in times][:3]
        if shown:
            parts.append(_times(f"benchmark-{at}", labels, rows, shown))
        parts.append(
            Table(
                ("", *(key.removesuffix("_bytes").replace("_", " ") for key in columns)),
                tuple(
                    (label, *(_cell(key, row.get(key)) for key in columns))
                    for label, row in zip(labels, rows, strict=True)
                ),
                "Loops in red train with a wrong gradient." if wrong else "",
                wrong=wrong,
            )
        )
        sections.append(Section(f"benchmark-of-{at}", f"Benchmark: {name}", tuple(parts)))
    return sections


def _rows(data: Data) -> tuple[list[str], list[Data]]:
    """Return the rows with their labels: the keys of `results`, or the texts in each of `rows`."""
    results = data.get("results")
    if isinstance(results, Mapping):
        items = [(str(name), row) for name, row in results.items() if isinstance(row, Mapping)]
        return [name for name, _ in items], [row for _, row in items]
    rows = [row for row in data.get("rows", ()) if isinstance(row, Mapping)]
    labels: list[str] = []
    rest: list[Data] = []
    for number, row in enumerate(rows, start=1):
        texts = [key for key, value in row.items() if isinstance(value, str)]
        words = texts[: 1 if "way" in row else 2]
        text = ", ".join(str(row[key]) for key in words)
        if "micro" in row:
            text += f", micro-batch {row['micro']}"
        labels.append(text or str(number))
        rest.append({key: value for key, value in row.items() if key not in (*words, "micro")})
    return labels, rest


def _about(data: Data) -> str:
    nested = data.get("about")
    known = {**data, **(nested if isinstance(nested, Mapping) else {})}
    names = ("subject", "date", "device", "machine", "precision", "torch", "python", "threads")
    return ", ".join(f"{name} {known[name]}" for name in names if _is_plain(known.get(name)))


def _times(name: str, labels: Sequence[str], rows: Sequence[Data], keys: Sequence[str]) -> Chart:
    traces = [
        bars(
            key.replace("_", " "),
            [row.get(key) if _is_number(row.get(key)) else None for row in rows],
            list(labels),
            series_color(at),
            orientation="h",
            marker={"color": ["--bad" if r.get("is_wrong") else series_color(at) for r in rows]},
            hovertemplate="%{x:.4g}",
        )
        for at, key in enumerate(keys)
    ]
    layout = by_row({"rangemode": "tozero"}, barmode="group", showlegend=True)
    height = 110 + len(labels) * (24 + 14 * len(keys))
    return Chart(name, "Times", traces, layout, height=height, wide=True)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _cell(key: str, value: object) -> str:
    if value is None:
        return "–"
    if key.endswith("_bytes") and isinstance(value, int | float):
        return bytes_said(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value) if _is_plain(value) else "…"
