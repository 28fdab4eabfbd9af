"""The files of `wholebatch tune --json` side by side, as one table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wholebatch.readable_sizes import bytes_said, short_count

TUNED = "wholebatch tune"
"""The kind of these files."""


def tuned_table(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a table with a row for each setting and two columns for each file.

    From the second file on, every number has its difference from the first file in percent.
    """
    head, notes = ["setting"], []
    for number, each in enumerate(measured, start=1):
        mark = f"{number}: " if len(measured) > 1 else ""
        head += [f"{mark}{each['unit']}/s", f"{mark}peak"]
        notes.append(_described(mark + each["name"], each))
    trials = [{_name(trial): trial for trial in each["trials"]} for each in measured]
    names = dict.fromkeys(name for each in trials for name in each)
    rows = []
    for name in names:
        row = [name]
        for each in trials:
            for key, said in (("units_per_second", short_count), ("peak", bytes_said)):
                own, first = each.get(name, {}).get(key), trials[0].get(name, {}).get(key)
                text = said(own) if own else ""
                if own and first and each is not trials[0]:
                    text += f" ({own / first - 1:+.0%})"
                row.append(text)
        rows.append(row)
    several = ", side by side" if len(measured) > 1 else ""
    return {"title": f"Settings, measured{several}", "head": head, "rows": rows, "notes": notes}


def _described(name: str, each: dict[str, Any]) -> str:
    """Return what a file was measured on."""
    ranks = each.get("ranks") or 1
    over = f" on {ranks} ranks" if ranks > 1 else ""
    versions = each.get("versions") or {}
    torch = f", torch {versions['torch']}" if "torch" in versions else ""
    batch = each["settings"]["batch_size"]
    return f"{name}: {each.get('recipe', '?')}, batch of {batch}{over}, {each['device']}{torch}"


def _name(trial: dict[str, Any]) -> str:
    """Return a setting in words."""
    words = [f"micro-batch {trial['micro_batch']}", trial["precision"], trial["execute"]]
    words += ["checkpointing"] if trial["checkpointing"] else []
    words += ["all-reduced in every micro-batch"] if (trial.get("reductions") or 0) > 1 else []
    return ", ".join(words)
