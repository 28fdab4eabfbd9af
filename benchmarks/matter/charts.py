"""The plots of the study, as SVG files that are readable on a light and on a dark page."""

from __future__ import annotations

import io
import statistics
from pathlib import Path
from typing import Any

# Colours as they are drawn, and the ones of a light and of a dark page that take their place.
PALETTE = {
    "#fefefe": ("back", "#ffffff", "#151b23"),
    "#1f2328": ("ink", "#1f2328", "#f0f6fc"),
    "#d0d7de": ("line", "#d0d7de", "#3d444d"),
    "#59636e": ("truth", "#59636e", "#9198a1"),
    "#d1495b": ("usual", "#d1495b", "#ff7b8a"),
    "#1a8f74": ("ours", "#1a8f74", "#2fbf9b"),
    "#b07d00": ("trainer", "#b07d00", "#e3b341"),
    "#a8b3c2": ("bar", "#a8b3c2", "#545d68"),
}
LOOKS: dict[str, dict[str, Any]] = {
    "undivided": {"color": "#59636e", "linewidth": 5, "alpha": 0.45},
    "usual loop": {"color": "#d1495b", "linewidth": 1.8},
    "usual loop, no step at the end": {"color": "#d1495b", "linewidth": 1.4, "linestyle": ":"},
    "HF Trainer": {"color": "#b07d00", "linewidth": 1.8, "linestyle": "--"},
    "wholebatch": {"color": "#1a8f74", "linewidth": 1.6},
}
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "wholebatch",
    "font.family": "sans-serif",
    "font.size": 9,
    "figure.facecolor": "#fefefe",
    "axes.facecolor": "#fefefe",
    "axes.edgecolor": "#d0d7de",
    "axes.labelcolor": "#1f2328",
    "axes.titlecolor": "#1f2328",
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": "#1f2328",
    "xtick.color": "#1f2328",
    "ytick.color": "#1f2328",
    "legend.frameon": False,
}


def save(figure: Any, path: Path) -> None:
    """Write the figure, with colours that follow the reader's page."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    svg = drawn.getvalue()
    rules = {"light": "", "dark": ""}
    for colour, (name, light, dark) in PALETTE.items():
        svg = svg.replace(colour, f"var(--{name}, {light})")
        rules["light"] += f"--{name}: {light}; "
        rules["dark"] += f"--{name}: {dark}; "
    css = (
        f"<style>svg {{ {rules['light']}}} "
        f"@media (prefers-color-scheme: dark) {{ svg {{ {rules['dark']}}} }}</style>"
    )
    begin = svg.index("<svg")
    head = svg.index(">", begin) + 1
    path.write_text(svg[begin:head] + css + svg[head:], encoding="utf-8")


def curve(axes: Any, setting: dict[str, Any]) -> None:
    """Draw the held-out loss of the ways that differ, the mean over the seeds."""
    for way, looks in LOOKS.items():
        row = setting["ways"].get(way)
        if row is None or "same_as" in row:
            continue
        runs = [one["curve"] for one in row["runs"]]
        places = [place for place, _ in runs[0]]
        heights = zip(*([loss for _, loss in run] for run in runs), strict=True)
        losses = [statistics.fmean(values) for values in heights]
        axes.plot(places, losses, label=way, **looks)
    axes.set_title(setting["title"], loc="left")
    axes.set_xlabel(f"{setting['units']} seen")
    axes.set_ylabel("held-out loss")
    axes.legend(fontsize=8)


def draw(results: dict[str, Any], folder: Path) -> None:
    """Write the plot of all settings, and the one curve of the first screen."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    settings = results["settings"]
    with pyplot.rc_context(STYLE):
        rows = -(-len(settings) // 2)
        figure, grid = pyplot.subplots(rows, 2, figsize=(9, 2.9 * rows), layout="constrained")
        for axes, setting in zip(grid.flat, settings.values(), strict=False):
            curve(axes, setting)
        for axes in grid.flat[len(settings) :]:
            axes.axis("off")
        save(figure, folder / "does-it-matter.svg")
        pyplot.close(figure)
        if "contrastive" in settings:
            figure, axes = pyplot.subplots(figsize=(6.4, 3.2), layout="constrained")
            curve(axes, settings["contrastive"])
            save(figure, folder / "loss-curve.svg")
            pyplot.close(figure)
