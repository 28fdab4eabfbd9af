"""Does a trainer's update depend on how the batch was split? Writes docs/split-dependence.md.

    python benchmarks/split_dependence.py                 # all trainers
    python benchmarks/split_dependence.py lightning jax   # these again; the other rows are kept

Public trainers, as their packages install them, each with its own gradient accumulation, on a tiny
model: how far is what they train from what they train on undivided batches? Every library runs in a
process of its own. What a row is, is said in `benchmarks/compare/__init__.py`. Fails if wholebatch
is above its limit in any row.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "src"), str(ROOT)]

from compare import ABOUT, CASES, LIBRARIES, LIMITS, Row  # noqa: E402
from pages import written  # noqa: E402

RECORD = ROOT / "docs" / "benchmarks" / "split_dependence.json"
PAGE = ROOT / "docs" / "split-dependence.md"
README = ROOT / "README.md"
MARK = "rows: "


def measured(name: str) -> list[Row]:
    """Return the rows of one library, from a process of its own."""
    quiet = {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    environment = {**os.environ, **LIBRARIES[name], **quiet}
    command = [sys.executable, __file__, "--in-this-process", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return [Row(**row) for row in json.loads(lines[-1].removeprefix(MARK))]


def train_as_rank(module: str, function: str, mode: str, result: str) -> None:
    """Train the case of two processes in one of them; rank 0 keeps the result."""
    import torch
    from compare.problem import PROBLEMS

    trained = getattr(import_module(module), function)(PROBLEMS["two processes"], mode)
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save(trained, result)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def off_by(error: float | None) -> str:
    """Return an error as the table shows it: "0" is rounding, of float64 or of float32."""
    if error is None:
        return ""
    return f"**{error:.0%}**" if error >= 0.01 else f"{error:.0e}"


def table(rows: Sequence[Row]) -> list[str]:
    """Return the table of all trainers, in the order of `ABOUT`."""
    lines = [
        f"| trainer | {' | '.join(CASES)} | why | with wholebatch |",
        f"|---|{'---:|' * len(CASES)}---|---:|",
    ]
    for trainer, about in ABOUT.items():
        of_trainer = [row for row in rows if row.trainer == trainer]
        if not of_trainer:
            continue
        own = {row.case: off_by(row.own) for row in of_trainer}
        name = f"{trainer} ({of_trainer[0].version})" if of_trainer[0].version else trainer
        ours = [row.ours for row in of_trainer if row.ours is not None]
        cells = [name, *(own.get(case, "") for case in CASES)]
        cells += [about.cause, off_by(max(ours)) if ours else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


SHORT = {
    "Trainer, Llama": "HF Trainer and SFTTrainer, a Llama",
    "Trainer, BERT": "HF Trainer, a BERT classifier",
    "Trainer, BERT, accepts_loss_kwargs=False": "… with `accepts_loss_kwargs = False`",
    "DPOTrainer": "TRL's DPOTrainer",
    "KTOTrainer": "TRL's KTOTrainer",
    "Accelerate": "Accelerate",
    "Lightning": "Lightning",
    "Keras, TensorFlow": "Keras 3",
}
"""The trainers of README.md, by their names there."""


def short_table(rows: Sequence[Row]) -> list[str]:
    """Return the table of README.md: the first four cases of some trainers."""
    cases = CASES[:4]
    lines = [f"| its own accumulation | {' | '.join(cases)} |", f"|---|{'---:|' * len(cases)}"]
    for trainer, name in SHORT.items():
        own = {row.case: off_by(row.own) for row in rows if row.trainer == trainer}
        lines.append(f"| {' | '.join([name, *(own.get(case, '') for case in cases)])} |")
    return lines


def workarounds() -> list[str]:
    """Return what the libraries themselves offer, and the discussions upstream."""
    lines = ["| trainer | without wholebatch | discussed in |", "|---|---|---|"]
    for trainer, about in ABOUT.items():
        link = ""
        if about.report:
            repository, number = about.report.split("#")
            link = f"[{about.report}](https://github.com/{repository}/issues/{number})"
        if about.workaround or link:
            lines.append(f"| {trainer} | {about.workaround} | {link} |")
    return lines


def page_of(page: str, rows: Sequence[Row], day: str) -> str:
    """Return the page with the tables of these rows."""
    limits = f"Measured on {day}. The command fails above {LIMITS['float64']:.0e} in float64"
    facts = [f"{limits}, and above {LIMITS['float32']:.0e} where a library computes in float32."]
    page = written(page, "trainers", [*table(rows), "", *facts])
    return written(page, "workarounds", workarounds())


def keep(record: dict[str, list[dict[str, object]]], day: str) -> None:
    """Write what was measured so far."""
    content = {"date": day, "libraries": record}
    RECORD.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("libraries", nargs="*", help=f"of {', '.join(LIBRARIES)}; default: all")
    parser.add_argument("--in-this-process", metavar="LIBRARY", help=argparse.SUPPRESS)
    parser.add_argument("--as-rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        train_as_rank(*options.as_rank)
        return
    if options.in_this_process:
        rows = import_module(f"compare.{options.in_this_process}").rows()
        print(MARK + json.dumps([asdict(row) for row in rows]))
        return
    unknown = sorted(set(options.libraries) - set(LIBRARIES))
    if unknown:
        parser.error(f"{unknown[0]}: must be one of {', '.join(LIBRARIES)}")

    record: dict[str, list[dict[str, object]]] = {}
    if options.libraries and RECORD.exists():
        record = json.loads(RECORD.read_text(encoding="utf-8"))["libraries"]
    day = date.today().isoformat()
    for name in options.libraries or LIBRARIES:
        rows = measured(name)
        record[name] = [asdict(row) for row in rows]
        for row in rows:
            errors = f"{off_by(row.own):>8}  {off_by(row.ours):>8}"
            print(f"{row.trainer:44} {row.case:14} {row.precision}  {errors}", flush=True)
        keep(record, day)
    every_row = [
        Row(**row)  # type: ignore[arg-type]
        for name in LIBRARIES
        for row in record.get(name, ())
    ]
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page_of(page, every_row, day), encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    README.write_text(written(readme, "trainers", short_table(every_row)), encoding="utf-8")
    above = [row for row in every_row if not row.keeps]
    if above:
        raise SystemExit("\n".join(f"above the limit: {row}" for row in above))


if __name__ == "__main__":
    main()
