"""Write docs/benchmarks/rival.md and batch_size.md from the files of the commands beside them.

wholebatch rival bytes-gpt --seconds 100 --rates 0.5,1 --out docs/benchmarks/rival.json
python benchmarks/gpu_batch_size.py --out docs/benchmarks/batch_size.json
python benchmarks/learning_pages.py

Also draws docs/images/batch-size.svg (with matplotlib).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wholebatch.core.readable_sizes import bytes_said

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

`{command}`, on {device}, torch {torch}, {date}: bytes-gpt with 126 M parameters, the same {sequences:,}
sequences of {context} bytes for each run of a seed. The schedule warms up over ten updates of the first batch and then
decays the rate by a cosine to a tenth, over the data. `auto` begins with the {start} batch. The target of a seed is the
loss with which the large batch ends, on 256 sequences that no run learns from. *rate* is that of the large batch; the
small one has 1/√2 of it.
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
            bytes_said(value) if name == "peak_bytes" else "not" if value is None else str(value)
            for name, value in row.items()
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def measured(one: dict[str, Any]) -> list[Any]:
    """Return the last looks of a run, each with the critical batch; the first had none yet."""
    return list(zip(one["held_out"][-len(one["critical"]) :], one["critical"], strict=True))


def verdict(rows: list[dict[str, Any]]) -> list[str]:
    """Return what `auto` made of the updates of the large batch, and how far seeds are apart."""
    ends = {
        name: [row["held-out loss"] for row in rows if row["run"] == name]
        for name in ("large", "auto")
    }
    spread = max(max(end) - min(end) for end in ends.values())
    by_seed = [
        row["of the large batch's"] or "not in this data" for row in rows if row["run"] == "auto"
    ]
    return [
        f"`auto` reached the loss of the large batch in {', '.join(by_seed)} of its updates (one figure for each "
        f"seed). Runs of one kind that differ in their seed alone end up to {spread:.4f} apart; those of one seed share "
        "the data and the first weights."
    ]


def plot(runs: list[dict[str, Any]], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "wholebatch"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    colours = {"small": "#a8b3c2", "large": "#4c6ef5", "auto": "#1a8f74"}
    for one in runs:
        name, _, seed = one["run"].split(":")
        label = name if seed == "0" else None
        updates, _, losses = zip(*one["held_out"], strict=True)
        axes.plot(updates, losses, color=colours[name], label=label, marker=".", linewidth=1)
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

    found = json.loads((FOLDER / "batch_size.json").read_text(encoding="utf-8"))
    plot(found["runs"], FOLDER.parent / "images" / "batch-size.svg")
    start = "small" if "--from small" in found["command"] else "large"
    lines = [
        BATCH_SIZE.format(**found, start=start),
        *table(found["rows"]),
        "",
        *verdict(found["rows"]),
        "",
    ]
    lines += [
        "![Held-out loss over updates](../images/batch-size.svg)",
        "",
        "The critical batch that `auto` measured, in sequences, after updates:",
        "",
        *(
            f"- seed {one['run'].rpartition(':')[2]}: "
            + ", ".join(f"{size:.0f} ({made})" for (made, *_), size in measured(one))
            for one in found["runs"]
            if one["critical"]
        ),
        "",
    ]
    cost = found.get("cost")
    if cost:
        lines += [
            f"A window of {cost['batch']} sequences takes {cost['window_ms']:.1f} ms. What a measured one has more "
            f"takes {cost['norm_ms']:.3f} ms (the norm) and {cost['estimate_ms']:.3f} ms (the estimate): "
            f"{cost['share_of_one_in_four']:.3%} of the time, as one window in four is measured.",
            "",
        ]
    (FOLDER / "batch_size.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
