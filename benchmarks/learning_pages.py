"""Write docs/benchmarks/rival.md and batch_size.md from the files of the commands beside them.

wholebatch rival bytes-gpt --seconds 100 --rates 0.5,1 --out docs/benchmarks/rival.json
python benchmarks/gpu_batch_size.py --out docs/benchmarks/batch_size.json
python benchmarks/learning_pages.py [FILE ...]

Each FILE is another result of gpu_batch_size.py: its runs and its cost are added to batch_size.json,
or take the place of those of the same name. Also draws docs/images/batch-size.svg (with matplotlib).
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from gpu_batch_size import SIZES
from gpu_batch_size import table as rows_of

from wholebatch.readable_sizes import bytes_said

FOLDER = Path(__file__).parents[1] / "docs" / "benchmarks"

# ruff: noqa: E501
RIVAL = """# The accumulated batch beside its micro-batch alone

`wholebatch rival bytes-gpt --seconds 100 --rates 0.5,1`, on {where}. Both train over the same {samples:,} samples. Alone,
the micro-batch has the learning rate by the square root and the β2 of the same half-life in tokens (Marek et al. 2025,
[arXiv:2507.07101](https://arxiv.org/abs/2507.07101)). *loss* is the mean over the last tenth of the data, before the
model has learned from it. *rate* is the factor of the learning rate; where the highest is the best, higher ones may be
better still. The run is short: measure your own recipe.
"""

BATCH_SIZE = """# A batch that follows the noise and the decay

```console
{commands}
```

On {device}, torch {torch}, {date}: bytes-gpt with 126 M parameters. Each run sees {sequences:,} sequences of {context}
bytes, or 1.08 times as many; those of a seed see the same data from the same first weights. The rate warms up over a
twentieth of the data, and then decays by a cosine to a tenth. The rates are those of the large batch; the small one has
1/√2 of it. `auto` begins with the large batch. `seesaw` is `auto` with the square root alone for the rate, whatever the
share of the noise. The target is the lowest loss with which a large batch ends, on 256 sequences that no run learns from,
looked at 16 times in a run. A fixed batch with a schedule of another length may reach it somewhat earlier; that was not
measured.
"""


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the rows as lines of Markdown; bytes in words."""
    names = list(rows[0])
    lines = [
        "| " + " | ".join(names).replace("peak_bytes", "peak") + " |",
        "|---" * len(names) + "|",
    ]
    for row in rows:
        cells = (
            bytes_said(value) if name == "peak_bytes" else "no" if value is None else str(value)
            for name, value in row.items()
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def measured(one: dict[str, Any]) -> list[Any]:
    """Return the last looks of a run, each with the critical batch; the first had none yet."""
    return list(zip(one["held_out"][-len(one["critical"]) :], one["critical"], strict=True))


def verdict(rows: list[dict[str, Any]]) -> list[str]:
    """Return the updates, the data and the loss of every `auto` beside its seed's large batch."""
    lines = []
    for row in rows:
        large = min(
            (r for r in rows if (r["run"], r["seed"]) == ("large", row["seed"])),
            key=lambda r: r["held-out loss"],
        )
        if row["run"] != "auto":
            continue
        updates, data = (row[n] / large[n] for n in ("updates", "sequences"))
        line = (
            f"- Seed {row['seed']}, {data:.0%} of the data: `auto` made {updates:.1%} of the updates of the large batch, "
            f"and ended at {row['held-out loss']:.4f} beside {large['held-out loss']:.4f}. "
        )
        made = row["updates to target"]
        reached = "It did not reach the target."
        if made:
            share, seen = made / large["updates"], row["sequences to target"] / large["sequences"]
            reached = (
                f"It reached the target in {share:.1%} of the updates, with {seen:.1%} of the data."
            )
        lines.append(line + reached)
    return lines


def together(rows: list[dict[str, Any]]) -> list[str]:
    """Return the distance of `auto` from its seed's large batch, over the seeds, by the data."""
    large = {r["seed"]: r for r in rows if r["run"] == "large" and r["rate"] == SIZES["124m"].rate}
    lines = []
    for data in (1.0, 1.08):
        found = [
            (row, large[row["seed"]])
            for row in rows
            if row["run"] == "auto"
            and abs(row["sequences"] / large[row["seed"]]["sequences"] - data) < 0.02
        ]
        if len(found) < 2:
            continue
        apart = [row["held-out loss"] - fixed["held-out loss"] for row, fixed in found]
        fewer = [1 - row["updates"] / fixed["updates"] for row, fixed in found]
        lines.append(
            f"- {data:.0%} of the data, {len(found)} seeds: {min(fewer):.1%} to {max(fewer):.1%} fewer updates, and a "
            f"final loss that differs from the large batch's by {statistics.fmean(apart):+.4f} on average "
            f"({min(apart):+.4f} to {max(apart):+.4f}, standard deviation {statistics.stdev(apart):.4f})."
        )
    return lines


def joined(found: dict[str, Any], files: list[str]) -> dict[str, Any]:
    """Return the results with those of further files."""
    runs = {one["run"]: one for one in found["runs"]}
    for file in files:
        more = json.loads(Path(file).read_text(encoding="utf-8"))
        runs |= {one["run"]: one for one in more.get("runs", ())}
        if "runs" in more:
            found["commands"].append(more["command"])
        if "cost" in more:
            found["cost"] = more["cost"]
    return found | {"runs": list(runs.values())}


COST = """## The cost of measuring the noise

`python benchmarks/gpu_batch_size.py --cost 4 --sequences 0`, on the same device: windows of `auto`'s first and largest batch,
in micro-batches of 4. Of three windows in turn, the second is measured, which takes a norm of all gradients and a read; in
the third, a new estimate may be made. *more* is the time of both beyond that of the first; no window is left out. *share* is
that of all windows in a run of 1,000, of which the first 96 have 24 measured ones. ± is the standard error of the mean.

| batch | a window, ms | more for a measured one, ms | median | measured | share of the time |
|---:|---:|---:|---:|---|---:|"""


def cost_row(row: dict[str, float]) -> str:
    return (
        f"| {row['batch']} | {row['window_ms']:.2f} | {row['extra_ms']:.3f} ± {row['extra_error_ms']:.3f} | "
        f"{row['extra_median_ms']:.3f} | one in {row['one_in']}, {row.get('rounds', row.get('pairs'))} timed | "
        f"{row['share']:.3%} ± {row['share_error']:.3%} |"
    )


def plot(runs: list[dict[str, Any]], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "wholebatch"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    colours = {"small": "#a8b3c2", "large": "#4c6ef5", "auto": "#1a8f74", "seesaw": "#e8590c"}
    styles, seen = {"0": "-", "1": "--", "2": ":"}, set()
    for one in runs:
        name, rate, seed, *_ = one["run"].split(":")
        if rate != "1":
            continue
        label = None if name in seen else name
        seen.add(name)
        updates, _, losses = zip(*one["held_out"], strict=True)
        axes.plot(updates, losses, styles[seed], color=colours[name], label=label, marker=".", lw=1)
    axes.set_xlabel("updates")
    axes.set_ylabel("held-out loss")
    axes.set_ylim(top=2.0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, metadata={"Date": None}, bbox_inches="tight")


def main() -> None:
    rival = json.loads((FOLDER / "rival.json").read_text(encoding="utf-8"))
    about = rival["about"]
    text = RIVAL.format(where=about.get("device", "a CPU"), samples=about["samples"])
    lines = [text, *table(rival["rows"]), "", *(f"- {line}" for line in rival["advice"]), ""]
    (FOLDER / "rival.md").write_text("\n".join(lines), encoding="utf-8")

    file = FOLDER / "batch_size.json"
    found = joined(json.loads(file.read_text(encoding="utf-8")), sys.argv[1:])
    file.write_text(json.dumps(found) + "\n", encoding="utf-8")
    plot(found["runs"], FOLDER.parent / "images" / "batch-size.svg")
    rows = rows_of(found["runs"], SIZES["124m"].rate)
    page = BATCH_SIZE.format(**found | {"commands": "\n".join(found["commands"])})
    lines = [page, *table(rows), "", *together(rows), *verdict(rows), ""]
    lines += [found["note"], ""] if "note" in found else []
    lines += [
        "![Held-out loss over updates](../images/batch-size.svg)",
        "",
        "The critical batch that `auto` measured, in sequences, after updates:",
        "",
        *(
            f"- {one['run']}: "
            + ", ".join(f"{size:.0f} ({made})" for (made, *_), size in measured(one))
            for one in found["runs"]
            if one["critical"]
        ),
        "",
    ]
    if "cost" in found:
        lines += [COST, *map(cost_row, found["cost"]), "", found.get("cost_note", ""), ""]
    (FOLDER / "batch_size.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
