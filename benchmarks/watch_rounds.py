"""Ask the judge of `wb.watch` about loops in a folder, and compare its answers with their labels.

    python benchmarks/watch_rounds.py FOLDER
    python benchmarks/watch_rounds.py FOLDER --only gan --words

FOLDER has Python files and `labels.txt`, with one line for each loop:

    train_gan.py            right
    loops.py:token_means    mean-of-means      # a function without arguments that trains

A label is "right" or the key of a mistake (`wholebatch.verification.MISTAKES`); what follows `#` is
a comment. Every loop runs in a process of its own, under a watch that is given no model. Printed
are the answers, and how many right loops were called wrong (false alarms), how many mistakes were
called right, not judged, or crashed. The exit status is 1 if a target of `--targets` is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FUNCTION = """
import importlib.util, json, sys
from wholebatch.verification.watch_loop import Watch
path, name = sys.argv[1:]
spec = importlib.util.spec_from_file_location("loops", path)
module = importlib.util.module_from_spec(spec)
sys.modules["loops"] = module
spec.loader.exec_module(module)
with Watch(name=name, logs=False) as watched:
    getattr(module, name)()
print(watched.verdict.to_json(indent=None))
"""
TARGETS = {"false alarm": 0.02, "called right": 0.02, "not judged": 0.25, "crash": 0.0}
"""The largest share of all loops that may fall into each column."""


def labels_of(folder: Path) -> dict[str, str]:
    """Return the label of every loop."""
    lines = (folder / "labels.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.partition("#")[0].split() for line in lines]
    return {row[0]: row[1] for row in rows if row}


def answer(folder: Path, name: str, seconds: int) -> tuple[str, str]:
    """Return what the judge found in a loop, and its verdict in a line."""
    file, _, function = name.partition(":")
    command = ["-m", "wholebatch.cli", "verify", "--json", "--windows", "0", file]
    if function:
        command = ["-c", FUNCTION, file, function]
    packages = f"{ROOT / 'src'}{os.pathsep}{folder}"
    environment = {**os.environ, "PYTHONPATH": packages, "HF_HUB_OFFLINE": "1", "CI": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            timeout=seconds,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "crash", f"no answer in {seconds} s"
    shown = [line for line in done.stdout.splitlines() if line]
    try:
        text = done.stdout[done.stdout.index("{\n") :] if not function else shown[-1]
        verdict = json.loads(text)
    except (ValueError, IndexError):
        return "crash", (done.stderr.splitlines() or ["no output"])[-1]
    found = "right" if verdict["same"] else (*verdict["mistakes"], "unknown")[0]
    return found if verdict["judged"] else "not judged", verdict["line"]


def column_of(label: str, found: str) -> str:
    """Return the column of the table into which an answer falls."""
    if found in ("crash", "not judged"):
        return found
    if label == "right":
        return "right" if found == "right" else "false alarm"
    return "called right" if found == "right" else "named" if found == label else "other cause"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="part of the names")
    parser.add_argument("--seconds", type=int, default=300, help="limit of one loop")
    parser.add_argument("--words", action="store_true", help="print verdicts that are not wanted")
    parser.add_argument("--targets", action="store_true", help="fail where a target is missed")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for name, label in labels_of(options.folder).items():
        if options.only not in name:
            continue
        found, words = answer(options.folder.resolve(), name, options.seconds)
        counts[column_of(label, found)] += 1
        print(f"{name:52} {found:26} {'' if found == label else label}", flush=True)
        if options.words and found != label:
            print(f"    {words}")
    total = counts.total()
    print(f"\n{total} loops")
    for column in ("right", "false alarm", "named", "other cause", "called right"):
        print(f"{column:14} {counts[column]}")
    print(f"{'not judged':14} {counts['not judged']}\n{'crash':14} {counts['crash']}")
    missed = [one for one, most in TARGETS.items() if counts[one] > most * total]
    if options.targets and missed:
        print(f"above its target: {', '.join(missed)}")
    return int(options.targets and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
