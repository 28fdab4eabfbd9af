"""Draw the bar chart of the README and of the site's home, from the recorded benchmark.

    python scripts/charts.py

Reads docs/benchmarks/speed.json and writes docs/images/speed.svg. A test compares their numbers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "speed.svg"
MODEL, MICRO = "gpt-124m", 4
# As the benchmark calls a loop -> its name here, from the slowest to ours.
BARS = {
    "Accelerate": "Accelerate",
    "Lightning": "Lightning",
    "loop": "hand-written loop",
    "HF Trainer": "HF Trainer",
    "loop + torch.compile": "loop + torch.compile",
    "wholebatch graph": "wholebatch",
}


def bars(measured: dict[str, Any]) -> list[tuple[str, float, str]]:
    """Return name, milliseconds and label of every loop, the slowest first."""
    rows = {
        row["mode"]: row
        for row in measured["rows"]
        if row["model"] == MODEL and row["micro"] in (MICRO, 0)
    }
    shown = sorted((mode for mode in BARS if mode in rows), key=lambda mode: -rows[mode]["ms"])
    return [
        (
            BARS[mode],
            rows[mode]["ms"],
            f"{rows[mode]['ms']:.0f} ms, {rows[mode]['reserved_gib']:.1f} GiB",
        )
        for mode in shown
    ]


def draw(measured: dict[str, Any]) -> None:
    """Write the chart: milliseconds per update and memory of every loop."""
    import matplotlib as mpl
    from matter.charts import STYLE, save

    mpl.use("svg")
    from matplotlib import pyplot

    about = measured["about"]
    whole = next(
        row
        for row in measured["rows"]
        if row["model"] == MODEL and row["mode"] == "whole batch, compiled"
    )
    names, heights, labels = zip(*reversed(bars(measured)), strict=True)
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(6.7, 3.1), layout="constrained")
        colours = ["#1a8f74" if name == "wholebatch" else "#a8b3c2" for name in names]
        drawn = axes.barh(names, heights, color=colours, height=0.68)
        axes.bar_label(drawn, labels, padding=5)
        axes.set_xlim(0, 1.35 * max(heights))
        axes.xaxis.set_visible(False)
        axes.tick_params(left=False)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.set_title("Time per update, GPT (12 × 768), 64 sequences of 1,024 tokens", loc="left")
        where = f"{about['device']}, torch {dict(about['packages'])['torch']}"
        figure.supxlabel(
            f"Micro-batches of {MICRO}, bf16, {where}. The undivided batch with torch.compile: "
            f"{whole['ms']:.0f} ms, {whole['reserved_gib']:.0f} GiB.",
            fontsize=8,
        )
        save(figure, PICTURE)
        pyplot.close(figure)


def main() -> None:
    sys.path[:0] = [str(ROOT / "benchmarks")]
    draw(json.loads((ROOT / "docs/benchmarks/speed.json").read_text(encoding="utf-8")))
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
