"""Memory by category over micro-batch sizes, from `wholebatch plan` and `wholebatch tune`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wholebatch.cli.report.page.elements import Chart, Section, Table, Text, series_color
from wholebatch.core.readable_sizes import CATEGORIES, bytes_said

__all__ = ["memory", "scale_of"]


def memory(plans: Sequence[tuple[str, Mapping[str, Any]]]) -> Section | None:
    """Return one stacked chart for each plan, with its budget as a line."""
    parts: list[Chart | Table | Text] = []
    for at, (name, plan) in enumerate(plans):
        points = plan["points"]
        if not points:
            continue
        by = f", by {plan['by']}" if plan.get("by") else ""
        title = f"Peak of a step by category: {plan.get('subject') or name}{by}"
        chosen = plan.get("micro_batch")
        said = f" Micro-batch {chosen} is the one to take." if chosen else ""
        caption = f"Predicted, {plan.get('precision', 'full')} precision.{said}"
        parts.append(_chart(f"memory-{at}", title, caption, points, plan.get("budget")))
        parts.append(_numbers(points))
    return Section("memory", "Memory over micro-batch size", tuple(parts)) if parts else None


def _chart(
    name: str, title: str, caption: str, points: Sequence[Mapping[str, Any]], budget: int | None
) -> Chart:
    sizes = [str(point["micro_batch"]) for point in points]
    scale, unit = scale_of(max(point["peak"] for point in points))
    traces: list[dict[str, Any]] = []
    for at, category in enumerate(CATEGORIES):
        values = [point["by_category"].get(category, 0) / scale for point in points]
        if max(values) * 200 < max(point["peak"] for point in points) / scale:
            continue  # Too small to see.
        traces.append(
            {
                "type": "bar",
                "name": category,
                "x": sizes,
                "y": values,
                "marker": {"color": series_color(at), "line": {"color": "--surface", "width": 1}},
                "hovertemplate": f"%{{y:.3g}} {unit}",
            }
        )
    highest = max(point["peak"] for point in points)
    # A budget far above would flatten everything else.
    if budget is not None and budget < 3 * highest:
        traces.append(
            {
                "type": "scatter",
                "mode": "lines" if len(sizes) > 1 else "lines+markers",  # One point gives no line.
                "name": "budget",
                "x": sizes,
                "y": [budget / scale] * len(sizes),
                "line": {"color": "--text", "width": 2, "dash": "dash"},
                "marker": {"color": "--text", "symbol": "line-ew-open", "size": 40},
                "hovertemplate": f"%{{y:.3g}} {unit}",
            }
        )
        if min(point["peak"] for point in points) > budget:
            caption += f" Nothing fits into the budget of {bytes_said(budget)}."
    elif budget is not None:
        caption += f" The budget of {bytes_said(budget)} is far above."
    layout = {
        "barmode": "stack",
        "bargap": 0.25 if len(sizes) > 2 else 0.7,
        "xaxis": {"title": {"text": "micro-batch, samples"}, "type": "category", "showgrid": False},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
    }
    return Chart(name, title, traces, layout, caption, height=380, wide=True)


def scale_of(most: float) -> tuple[float, str]:
    """Return the divisor and the unit for byte values up to `most`."""
    for size, unit in ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")):
        if most >= size:
            return size, unit
    return 1.0, "bytes"


def _numbers(points: Sequence[Mapping[str, Any]]) -> Table:
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
