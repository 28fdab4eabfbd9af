"""The page docs/benchmarks/memory.md, from the rows of benchmarks/gpu_memory.py."""

from __future__ import annotations

from typing import Any

__all__ = ["page"]

GIB = 2**30
LIMITS = {"transformer": 3.0, "cnn": 8.0}


def page(found: dict[str, Any]) -> str:
    """Both tables, each after a line that says whether what was wanted is reached."""
    rows = found["rows"]
    predicted = [row for row in rows if row["what"] == "predict" and "measured" in row]
    chosen: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["what"] == "choose":  # the later row of a model is the whole one
            chosen[row["model"]] = row
    lines = [
        "# Memory: predicted, measured, chosen",
        "",
        f"Written by `benchmarks/gpu_memory.py` on {found['device']}, torch {found['torch']}.",
        "",
        "## Predicted peak beside the measured one",
        "",
        *_predictions(predicted),
        "",
        "## The chosen micro-batch beside the largest that runs",
        "",
        *_choices(list(chosen.values())),
    ]
    return "\n".join(lines) + "\n"


def _error(row: dict[str, Any], which: str) -> float:
    return 100 * (float(row[which]) / float(row["measured"]) - 1)


def _predictions(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return ["Not measured."]
    lines = [
        "A window of two micro-batches with AdamW, its state there. *Corrected*: with what two "
        "smaller steps (a quarter and half of the size) took on the device beyond their "
        'prediction, as `micro_batch="auto"` does it.',
        "",
    ]
    for kind, limit in LIMITS.items():
        mine = [row for row in rows if row["kind"] == kind]
        if not mine:
            continue
        plain = [abs(_error(row, "predicted")) for row in mine]
        right = [abs(_error(row, "corrected")) for row in mine]
        within = sum(error <= limit for error in right)
        names = len({row["model"] for row in mine})
        lines.append(
            f"- {kind}s: {within} of {len(mine)} rows ({names} models) within {limit:g}% with the "
            f"correction, the worst {max(right):.1f}%; without it the worst {max(plain):.1f}%."
        )
    slowest = max(rows, key=lambda row: float(row["seconds"]))
    lines += [
        f"- The slowest prediction took {slowest['seconds']:.1f} s ({slowest['model']}), with "
        "all models side by side.",
        "",
        "| model | micro-batch | precision | checkpointed | measured | predicted | corrected |",
        "|---|---:|---|---|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['model']} | {row['size']} | {row['precision']} | "
            f"{'yes' if row['checkpointed'] else 'no'} | {row['measured'] / GIB:.3f} GiB | "
            f"{_error(row, 'predicted'):+.2f}% | {_error(row, 'corrected'):+.2f}% |"
        )
    return lines


def _ran_out(row: dict[str, Any]) -> int:
    return int(row["failed_trials"]) + int(not row["ran"])


def _choices(rows: list[dict[str, Any]]) -> list[str]:
    whole = [row for row in rows if row["largest"]]
    if not whole:
        return ["Not measured."]
    good = [row for row in whole if row["chosen"] >= min(0.9 * row["largest"], row["largest"] - 1)]
    quiet = [row for row in rows if not _ran_out(row)]
    lines = [
        "Under `torch.cuda.set_per_process_memory_fraction`, the size that prediction, correction "
        "and one trial step choose; and the largest that runs a window with its update, looked "
        "for size by size (by one in a hundred above 100) until three in a row fail.",
        "",
        f"- {len(good)} of {len(whole)} choices are at least 90% of the largest, or one less.",
        f"- {len(quiet)} of {len(rows)} models never ran out of memory on the way, the trial step "
        "and the first windows included. (What cuDNN asks for, is refused, and does without, does "
        "not count.)",
        "",
        "| model | precision | checkpointed | limit | chosen | largest | share | out of memory | "
        "seconds |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        share = f"{100 * row['chosen'] / row['largest']:.0f}%" if row["largest"] else ""
        lines.append(
            f"| {row['model']} | {row['precision']} | {'yes' if row['checkpointed'] else 'no'} | "
            f"{row['limit'] / GIB:g} GiB | {row['chosen']} | {row['largest'] or 'not found'} | "
            f"{share} | {_ran_out(row)} | {row['seconds']:.1f} |"
        )
    return lines
