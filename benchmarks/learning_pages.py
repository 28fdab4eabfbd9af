"""Write docs/benchmarks/rival.md and batch_size.md from the files of the commands beside them.

wholebatch rival bytes-gpt --seconds 100 --rates 0.5,1 --out docs/benchmarks/rival.json
python benchmarks/gpu_batch_size.py --out docs/benchmarks/batch_size.json
python benchmarks/learning_pages.py
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

BATCH_SIZE = """# A batch that follows the noise

`python benchmarks/gpu_batch_size.py --model {model} --sequences {sequences}`, on {device}: bytes-gpt with {parameters:,}
parameters, {sequences:,} sequences of {context} bytes in each run, torch {torch}, {date}. `auto` begins with the small
batch, doubles as the critical batch grows, and doubles as the schedule lowers the rate. The large batch is the one that
`auto` had in the middle of its data: what the noise advises. The target is the large batch's loss at its end, on 256
sequences that no run learns from. The learning rate is {rate:g} at the batch that it is for, follows by the square root,
and decays by a cosine to a tenth. One run of each: two runs that differ in nothing but their seed may end as far apart as
these do, so a small difference says nothing.
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


def main() -> None:
    rival = json.loads((FOLDER / "rival.json").read_text(encoding="utf-8"))
    about = rival["about"]
    text = RIVAL.format(where=about.get("device", "a CPU"), samples=about["samples"])
    lines = [text, *table(rival["rows"]), "", *(f"- {line}" for line in rival["advice"]), ""]
    (FOLDER / "rival.md").write_text("\n".join(lines), encoding="utf-8")

    found = json.loads((FOLDER / "batch_size.json").read_text(encoding="utf-8"))
    lines = [BATCH_SIZE.format(**found), *table(found["rows"]), ""]
    large, auto, *_ = found["rows"]
    reached = auto["updates to target"]
    lines += [
        f"Over the same data, `auto` made {auto['updates'] / large['updates']:.0%} of the updates of the large "
        f"batch, and ended at a held-out loss of {auto['held-out loss']:.4f} beside {large['held-out loss']:.4f}. "
        + (
            f"It reached the loss of the large batch in {reached / large['updates']:.0%} of its updates."
            if reached
            else "It did not reach the loss of the large batch."
        ),
        "",
        "Held-out loss after updates:",
        "",
        *(
            f"- {name}: " + ", ".join(f"{loss:.3f} ({made})" for made, _, loss in points)
            for name, points in found["curves"].items()
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
