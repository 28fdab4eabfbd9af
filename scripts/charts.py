"""Draw the bar chart of the README and of the site's home, from the recorded benchmark.

    python scripts/charts.py

Reads docs/benchmarks/speed.json and writes docs/images/speed.svg. A test compares the two.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
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
_WIDTH, _BAR, _GAP, _LEFT, _TOP = 640, 26, 12, 168, 62

_STYLE = """
    .back { fill: #ffffff; stroke: #d0d7de; } .ink { fill: #1f2328; } .soft { fill: #59636e; }
    .bar { fill: #a8b3c2; } .ours { fill: #1a8f74; }
    @media (prefers-color-scheme: dark) {
      .back { fill: #151b23; stroke: #3d444d; } .ink { fill: #f0f6fc; } .soft { fill: #9198a1; }
      .bar { fill: #545d68; } .ours { fill: #2fbf9b; }
    }
"""


def speed_chart(measured: dict[str, Any]) -> str:
    """Return the chart as SVG: milliseconds per update and memory of every loop."""
    rows = {
        row["mode"]: row
        for row in measured["rows"]
        if row["model"] == MODEL and row["micro"] in (MICRO, 0)
    }
    shown = sorted((name for name in BARS if name in rows), key=lambda name: -rows[name]["ms"])
    scale = (_WIDTH - _LEFT - 150) / max(rows[name]["ms"] for name in shown)
    about = measured["about"]
    versions = dict(about["packages"])
    head = "Time per update, GPT (12 × 768), 64 sequences of 1,024 tokens"
    where = f"{about['device']}, torch {versions['torch']}"
    sub = f"micro-batches of {MICRO}, bf16, {where}; less is better"
    parts, y = [], _TOP
    for name in shown:
        row = rows[name]
        ours = name == "wholebatch graph"
        width = row["ms"] * scale
        weight = ' font-weight="700"' if ours else ""
        parts += [
            f'<text class="ink" x="{_LEFT - 10}" y="{y + 18}" text-anchor="end"{weight}>'
            f"{escape(BARS[name])}</text>",
            f'<rect class="{"ours" if ours else "bar"}" x="{_LEFT}" y="{y}" width="{width:.1f}" '
            f'height="{_BAR}" rx="3"/>',
            f'<text class="ink" x="{_LEFT + width + 8:.1f}" y="{y + 18}"{weight}>'
            f'{row["ms"]:.0f} ms<tspan class="soft" font-weight="400">  '
            f"{row['reserved_gib']:.1f} GiB</tspan></text>",
        ]
        y += _BAR + _GAP
    whole = rows["whole batch, compiled"]
    note = (
        f"The undivided batch with torch.compile: {whole['ms']:.0f} ms, "
        f"{whole['reserved_gib']:.0f} GiB."
    )
    height = y + 30
    text = "\n  ".join(parts)
    font = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" \
aria-labelledby="title" font-family="{font}" font-size="14">
  <title id="title">{head}: {rows["wholebatch graph"]["ms"]:.0f} ms with wholebatch</title>
  <style>{_STYLE}  </style>
  <rect class="back" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="8"/>
  <text class="ink" x="20" y="28" font-size="16" font-weight="700">{head}</text>
  <text class="soft" x="20" y="48" font-size="12.5">{escape(sub)}</text>
  {text}
  <text class="soft" x="20" y="{height - 14}" font-size="12.5">{note}</text>
</svg>
"""


def main() -> None:
    measured = json.loads((ROOT / "docs/benchmarks/speed.json").read_text(encoding="utf-8"))
    path = ROOT / "docs/images/speed.svg"
    path.write_text(speed_chart(measured), encoding="utf-8")
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
