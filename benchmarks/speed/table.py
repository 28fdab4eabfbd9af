"""The results of gpu_speed.py as JSON and as the tables of docs/benchmarks/speed.md."""

from __future__ import annotations

import json
import platform
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from speed.models import CASES
from speed.together import Spec

__all__ = ["Results"]

PACKAGES = ["torch", "accelerate", "lightning", "transformers"]
NAMES = {
    "whole": "wholebatch graph",
    "loop": "loop",
    "loop+": "loop + torch.compile",
    "trainer": "HF Trainer",
    "lightning": "Lightning",
    "accelerate": "Accelerate",
}
UNDIVIDED = "whole batch, compiled"
PEERS = ("loop", "HF Trainer", "Lightning", "Accelerate")
ABOUT = (
    "One update from a whole window, fused AdamW, without clipping: milliseconds of the median "
    "window. Every loop has a process of its own and is timed while all others are stopped. bf16 "
    "autocast; windows of 64 sequences of 1024 tokens (gpt-124m), 32 of them (gpt-1.3b), 128 "
    "images (resnet-50) and 128 sequences (encoder). GiB is what the process has reserved for "
    "tensors, recorded graphs included. The best peer is the fastest of the hand-written loop and "
    "the trainers; torch.compile in that loop is a row of its own. resnet-50 has GroupNorm, so "
    "that all loops train the same model; encoder (64 to 512 tokens) is padded to the longest of a "
    "micro-batch, by wholebatch to a budget of as many tokens."
)


class Results:
    """All rows so far, by model, name and micro-batch size (0: the whole batch)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "speed.json"
        saved = json.loads(self._file.read_text()) if self._file.exists() else {"rows": []}
        self._rows = {(row["model"], row["mode"], row["micro"]): row for row in saved["rows"]}
        self._about: dict[str, Any] = saved.get("about", {})

    def has(self, spec: Spec) -> bool:
        """Return True if this row has been timed."""
        return "ms" in self._rows.get(_key(spec), {})

    def add(self, row: dict[str, Any]) -> None:
        """Print a row and write everything so far: nothing is lost if the run is stopped."""
        key = _key((row["model"], row["loop"], row["micro"]))
        name = f"{key[0]}, {key[1]}, micro-batch {key[2]}"
        if "error" in row:
            print(f"{name}: {row['error']} (an earlier result is kept)", flush=True)
            return
        print(f"{name}: {row['ms']:.1f} ms, {row['gib']:.2f} GiB", flush=True)
        made = dict(zip(("model", "mode", "micro"), key, strict=True))
        day = date.today().isoformat()
        self._rows[key] = {**made, "ms": row["ms"], "reserved_gib": row["gib"], "date": day}
        self._about = {
            "date": day,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU",
            "python": platform.python_version(),
            "packages": _versions(),
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        rows = [self._rows[key] for key in sorted(self._rows)]
        self._file.write_text(json.dumps({"about": self._about, "rows": rows}, indent=1) + "\n")
        (self._folder / "speed.md").write_text(self.markdown())

    def markdown(self) -> str:
        """Return the page."""
        versions = ", ".join(f"{name} {version}" for name, version in self._about["packages"])
        head = (
            f"Written by `python benchmarks/gpu_speed.py` on {self._about['date']}: "
            f"{self._about['device']}, Python {self._about['python']}, {versions}."
        )
        lines = ["# Speed", "", head, "", ABOUT]
        for model in dict.fromkeys(key[0] for key in sorted(self._rows)):
            lines += ["", f"## {model}", "", *self._table(model)]
        return "\n".join(lines) + "\n"

    def _table(self, model: str) -> list[str]:
        mine = {key[1:]: row for key, row in sorted(self._rows.items()) if key[0] == model}
        sizes = sorted({size for _, size in mine if size})
        last = {mode: row["ms"] for (mode, _), row in mine.items()}  # of the largest size
        lines = ["| | " + " | ".join(f"micro-batch {size}" for size in sizes) + " |"]
        lines.append("|---|" + "---:|" * len(sizes))
        for mode in sorted(last, key=lambda mode: last[mode]):
            cells = []
            for size in sizes:
                row = mine.get((mode, size)) or mine.get((mode, 0))
                peers = [mine[peer, size]["ms"] for peer in PEERS if (peer, size) in mine]
                best = min(peers, default=None) if mode == NAMES["whole"] else None
                cells.append(_cell(row, best))
            lines.append(f"| {mode} | " + " | ".join(cells) + " |")
        return lines


def _key(spec: Spec) -> tuple[str, str, int]:
    model, loop, micro = spec
    if micro == CASES[model].window:
        return model, UNDIVIDED, 0
    return model, NAMES.get(loop, loop), micro


def _cell(row: dict[str, Any] | None, best: float | None) -> str:
    if row is None:
        return ""
    ratio = f", {best / row['ms']:.2f}× the best peer" if best else ""
    bold = "**" if ratio else ""
    return f"{bold}{row['ms']:.1f} ms{bold}{ratio}; {row['reserved_gib']:.1f} GiB"


def _versions() -> list[list[str]]:
    found = []
    for name in PACKAGES:
        try:
            found.append([name, metadata.version(name)])
        except metadata.PackageNotFoundError:
            continue
    return found
