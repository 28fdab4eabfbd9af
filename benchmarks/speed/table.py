"""The results as JSON, as tables for the docs, and as plots where matplotlib is installed."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = ["Results"]

PACKAGES = ["torch", "accelerate", "pytorch-lightning", "lightning", "transformers"]
WHOLE = ("whole batch, compiled", "whole batch")


class Results:
    """All rows so far, by model, mode and micro-batch size."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "speed",
        measuring: bool = True,
        merged: Sequence[Path] = (),
    ) -> None:
        self._folder = folder
        self._name = name
        self._file = folder / f"{name}.json"
        self._rows: dict[tuple[str, str, int], dict[str, Any]] = {}
        self._about: dict[str, Any] = {}
        for file in (self._file, *merged):
            if file.exists():
                self._take_over(json.loads(file.read_text()))
        if not measuring:
            return
        self._about.update(
            notes=[],
            date=date.today().isoformat(),
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device",
            python=platform.python_version(),
            packages=_versions(),
        )

    def _take_over(self, saved: dict[str, Any]) -> None:
        """The rows of another run; what has a time is not replaced by what has none."""
        self._about = saved["about"]
        for row in saved["rows"]:
            key = (row["model"], row["mode"], row["micro"])
            if "ms" in row or key not in self._rows:
                self._rows[key] = row

    def has(self, spec: tuple[str, str, int]) -> bool:
        """Whether this row has been timed."""
        return "ms" in self._rows.get(spec, {})

    @property
    def _what(self) -> str:
        """What rows are compared by; a CPU that others use too has no other honest measure."""
        return "ms" if self._about.get("peak_tflops") else "processor_ms"

    def peak(self, tflops: float) -> None:
        """What a bf16 matrix product of 8192³ reached in this run."""
        self._about["peak_tflops"] = tflops
        if tflops:
            print(f"bf16 matrix product: {tflops:.0f} TFLOP/s", flush=True)

    def add(self, row: dict[str, Any]) -> None:
        """One row, printed at once."""
        key = (row["model"], row["mode"], row["micro"])
        if "error" in row and "ms" in self._rows.get(key, {}):
            print(f"{key}: {row['error']} (an earlier result is kept)", flush=True)
            return
        self._rows[key] = {**row, "date": date.today().isoformat()}
        told = row.get("error") or (
            f"{row['ms']:.1f} ms ({row['fastest_ms']:.1f} to {row['slowest_ms']:.1f}), "
            f"{row['tflops']:.0f} TFLOP/s, {row['allocated_gib']:.2f} GiB allocated, "
            f"{row['reserved_gib']:.2f} reserved, {row['driver_gib']} by the driver, "
            f"warm-up {row['warm_up_s']:.0f} s, losses {row['losses']}"
        )
        print(f"{row['model']} {row['mode']} micro {row['micro']}: {told}", flush=True)
        self.write()

    def write(self) -> None:
        """Everything so far, so that nothing is lost if the run is stopped."""
        self._folder.mkdir(parents=True, exist_ok=True)
        rows = [self._rows[key] for key in sorted(self._rows)]
        self._file.write_text(json.dumps({"about": self._about, "rows": rows}, indent=1) + "\n")
        (self._folder / f"{self._name}.md").write_text(self.markdown())

    def markdown(self) -> str:
        """The tables of docs/benchmarks/speed.md."""
        versions = ", ".join(f"{name} {version}" for name, version in self._about["packages"])
        peak = self._about.get("peak_tflops")
        lines = [
            "# Speed",
            "",
            f"Written by `benchmarks/gpu_speed.py` on {self._about['date']}: "
            f"{self._about['device']}, Python {self._about['python']}, {versions}."
            + (f" A bf16 matrix product of 8192³ reached {peak:.0f} TFLOP/s." if peak else ""),
            "",
            "One update from a whole window, fused AdamW, without clipping: milliseconds of the "
            "median window. Every loop has a process of its own and is timed while all others are "
            "stopped.",
            "",
            *(_ON_CUDA if peak else _ON_CPU),
            *(f"\n{note}" for note in self._about.get("notes", [])),
        ]
        for model in dict.fromkeys(key[0] for key in sorted(self._rows)):
            lines += ["", f"## {model}", "", *self._table(model), ""]
            if self._drawn(model):
                lines += [f"![Time and memory over the micro-batch]({self._name}-{model}.png)"]
            lines += self._profiles(model)
        return "\n".join(lines) + "\n"

    def _drawn(self, model: str) -> bool:
        """Whether ours are beside others: our own alone are in the table."""
        modes = [mode for its, mode, _ in self._rows if its == model]
        return not all(mode.startswith("wholebatch") for mode in modes)

    def _table(self, model: str) -> list[str]:
        mine = {key[1:]: row for key, row in self._rows.items() if key[0] == model}
        sizes = sorted({size for mode, size in mine if mode not in WHOLE})
        modes = sorted(
            dict.fromkeys(mode for mode, _ in mine), key=lambda mode: _order(mine, mode, self._what)
        )
        best = {
            size: min(
                (
                    row[self._what]
                    for (mode, its), row in mine.items()
                    if its == size and "ms" in row and mode in _PEERS
                ),
                default=None,
            )
            for size in sizes
        }
        head = ["| | " + " | ".join(f"micro-batch {size}" for size in sizes) + " |"]
        head.append("|---|" + "---:|" * len(sizes))
        for mode in modes:
            cells = []
            for size in sizes:
                row = mine.get((mode, size)) or (mine.get((mode, 0)) if mode in WHOLE else None)
                cells.append(self._cell(row, best[size], ours=mode.startswith("wholebatch")))
            head.append(f"| {mode} | " + " | ".join(cells) + " |")
        return head

    def _profiles(self, model: str) -> list[str]:
        """Write one table of where a window's time goes: kernels by kind, and the idle device."""
        profiles = {
            f"{mode}, {micro or 'undivided'}": row
            for (its, mode, micro), row in sorted(self._rows.items())
            if its == model and "kernels" in row
        }
        if not profiles:
            return []
        kinds = {name: dict.fromkeys((*_KINDS.values(), "other kernels"), 0.0) for name in profiles}
        for name, row in profiles.items():
            for ms, _, kernel in row["kernels"]:
                kinds[name][_kind(kernel)] += ms
            kinds[name]["other kernels"] += row["kernel_ms"] - sum(kinds[name].values())
            kinds[name]["no kernel running"] = max(0.0, row["ms"] - row["kernel_ms"])
        lines = ["", "Where the ms of a window go:", ""]
        lines += ["| | " + " | ".join(profiles) + " |", "|---|" + "---:|" * len(profiles)]
        for kind in next(iter(kinds.values())):
            cells = " | ".join(f"{found[kind]:.0f}" for found in kinds.values())
            lines.append(f"| {kind} | {cells} |")
        return lines

    def _cell(self, row: dict[str, Any] | None, best: float | None, *, ours: bool) -> str:
        if row is None:
            return ""
        if "error" in row:
            return str(row["error"])[:60].replace("|", "/")
        peak = self._about.get("peak_tflops")
        share = f", {row['tflops'] / peak:.0%} of peak" if peak and row["tflops"] else ""
        ratio = f", {best / row[self._what]:.2f}× the best peer" if ours and best else ""
        bold = "**" if ours and ratio else ""
        energy = f"; {row['joules']:.0f} J" if row.get("joules") else ""
        worked = "" if peak else f" (processor {row['processor_ms']:.0f} ms)"
        told = f"{bold}{row['ms']:.1f} ms{bold}{worked}{ratio}{share}"
        memory = f"; {row['reserved_gib']:.1f} GiB" if row["reserved_gib"] else ""
        return f"{told}{memory}{energy}"

    def plot(self) -> None:
        """Time and memory over the micro-batch, where matplotlib is installed."""
        try:
            import matplotlib  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            return
        matplotlib.use("Agg")
        from matplotlib import pyplot

        for model in filter(self._drawn, dict.fromkeys(key[0] for key in self._rows)):
            mine = {
                key[1:]: row
                for key, row in sorted(self._rows.items())
                if key[0] == model and "ms" in row
            }
            shown = {self._what: f"{self._what.replace('_', ' ')} per window"}
            if any(row["reserved_gib"] for row in mine.values()):
                shown["reserved_gib"] = "GiB"
            figure, grid = pyplot.subplots(
                1, len(shown), figsize=(1 + 5 * len(shown), 4), squeeze=False
            )
            for axis, (what, label) in zip(grid[0], shown.items(), strict=True):
                for mode in dict.fromkeys(mode for mode, _ in mine):
                    rows = [row for (its, _), row in mine.items() if its == mode]
                    if mode in WHOLE:  # has no micro-batch: a line across all of them
                        at = 0.02 if mode == WHOLE[0] else 0.4
                        axis.axhline(rows[0][what], ls="--", c="0.4" if mode == WHOLE[0] else "0.7")
                        axis.annotate(
                            mode,
                            (at, rows[0][what]),
                            xytext=(0, 2),
                            xycoords=("axes fraction", "data"),
                            textcoords="offset points",
                            fontsize=7,
                        )
                        continue
                    if _is_variant(mode):
                        continue
                    sizes = [row["micro"] for row in rows]
                    width = 3.0 if mode.startswith("wholebatch") else 1.2
                    axis.plot(sizes, [row[what] for row in rows], "o-", label=mode, lw=width)
                highest = 1.1 * max(row[what] for row in mine.values())  # names stand above lines
                axis.set(xlabel="micro-batch", ylabel=label, xscale="log", ylim=(0, highest))
                axis.set_xticks(sorted({size for _, size in mine if size}))
                axis.xaxis.set_major_formatter("{x:.0f}")
                axis.xaxis.set_minor_formatter("")
            if grid[0][-1].get_legend_handles_labels()[0]:
                grid[0][-1].legend(fontsize=7)
            figure.suptitle(model)
            figure.tight_layout()
            figure.savefig(self._folder / f"{self._name}-{model}.png", dpi=110)
            pyplot.close(figure)


_ON_CUDA = [
    "bf16 autocast; windows of 64 sequences of 1024 tokens (gpt-124m), 32 of them (gpt-1.3b), 128 "
    "images (resnet-50) and 128 sequences (encoder). Memory is what the process has taken from the "
    "driver for tensors (the caching allocator's and the recordings' pools), in GiB; energy is "
    "what the driver counted for a window. The best peer is the fastest of the hand-written loop "
    "and the trainers; torch.compile in that loop is a row of its own. resnet-50 has GroupNorm, so "
    "that all loops train the same model; encoder (64 to 512 tokens) is padded to the longest of a "
    "micro-batch, by wholebatch to a budget of as many tokens.",
]
_ON_CPU = [
    "fp32 on a CPU; all loops take turns, window by window, so that what else the machine does "
    "disturbs them alike. Windows of 16 sequences of 128 tokens. The best peer is the fastest of "
    "the hand-written loop and the trainers; torch.compile in that loop is a row of its own. "
    "Beside the time that passed stands the processor's own (all threads of the process), which "
    "other programs on the machine disturb least: ratios and the plot are of that. Memory was not "
    "measured.",
]
_PEERS = ("loop", "HF Trainer", "Lightning", "Accelerate", "Fabric")
_KINDS = {
    "badd": "matrix products",
    "nvjet": "matrix products",
    "gemm": "matrix products",
    "sdpa": "attention",
    "flash": "attention",
    "cudnn": "attention",
}


def _is_variant(mode: str) -> bool:
    return mode.startswith("wholebatch") and "," in mode


def _kind(kernel: str) -> str:
    return next((kind for mark, kind in _KINDS.items() if mark in kernel), "other kernels")


def _order(mine: dict[tuple[str, int], dict[str, Any]], mode: str, what: str) -> float:
    """The fastest mode first, by its largest micro-batch."""
    rows = [row for (its, _), row in sorted(mine.items()) if its == mode and "ms" in row]
    return float(rows[-1][what]) if rows else 9e9


def _versions() -> list[list[str]]:
    found = []
    for name in PACKAGES:
        try:
            found.append([name, metadata.version(name)])
        except metadata.PackageNotFoundError:
            continue
    return found
