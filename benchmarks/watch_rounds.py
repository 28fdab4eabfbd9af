"""Ask the judge of `wb.watch` about loops in a folder, and compare its answers with their labels.

    python benchmarks/watch_rounds.py FOLDER
    python benchmarks/watch_rounds.py FOLDER --only gan --words
    python benchmarks/watch_rounds.py --history --page     # docs/internals/watch-figures.md
    python benchmarks/watch_rounds.py --cost               # of a window, recorded and counted

FOLDER has Python files and `labels.txt`, with one line for each loop:

    train_gan.py            right
    loops.py:token_means    mean-of-means      # a function without arguments that trains

A label is "right" or the key of a mistake (`wholebatch.verification.MISTAKES`); what follows `#` is
a comment. Every loop runs in a process of its own, under a watch that is given no model. Printed
are the answers, and how many right loops were called wrong (false alarms), how many mistakes were
called right, not judged, or crashed. The exit status is 1 if a target of `--targets` is missed.

`--history` asks about the loops in the history of this repository: 575 of earlier rounds, each with
the undivided training beside it, and 84 scripts that were labelled before their first run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
ROUNDS = """
import importlib, json, sys
from unittest.mock import patch
import torch, wholebatch as wb
from tests.verification.loops.live import quiet
for number in range(6, 21):
    importlib.import_module(f"tests.verification.fixtures.round_{number}")
from tests.verification.fixtures.rounds import CASES
for name, (number, key, make) in CASES.items():
    if name.startswith("ranks_") or sys.argv[1] not in name:
        continue
    try:
        with quiet(), patch.dict("os.environ"):
            torch.manual_seed(0)
            watched, train, _ = make()
            with wb.watch(*(watched if isinstance(watched, tuple) else (watched,))) as watch:
                train()
        found = json.loads(watch.verdict.to_json())
    except Exception as error:
        found = {"error": repr(error)}
    print("ANSWER " + json.dumps([name, key, found]), flush=True)
"""
RENAMED = {"moved-average": "averaged-per-micro-batch"}
"""Labels of the history whose mistakes have other keys today."""
FIXTURES, SCRIPTS = "779e268f", "96a469c2"
"""The commits that have the loops of earlier rounds, and the 84 scripts."""
PAGE = ROOT / "docs" / "internals" / "watch-figures.md"
TARGETS = {"false alarm": 0.0, "called right": 0.01, "not judged": 0.25, "crash": 0.0}
"""The largest share of all loops that may fall into each column."""


def labels_of(folder: Path) -> dict[str, str]:
    """Return the label of every loop."""
    lines = (folder / "labels.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.partition("#")[0].split() for line in lines]
    return {row[0]: RENAMED.get(row[1], row[1]) for row in rows if row}


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
    return told(verdict)


def told(verdict: dict[str, Any]) -> tuple[str, str]:
    """Return what a verdict says, and its line."""
    if "error" in verdict:
        return "crash", verdict["error"]
    found = "right" if verdict["same"] else (*verdict["mistakes"], "unknown")[0]
    return found if verdict["judged"] else "not judged", verdict["line"]


def of_earlier_rounds(folder: Path, only: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, label, answer and words of the 575 loops, which run in one process."""
    for commit, path in ((FIXTURES, "tests/verification"), ("HEAD", "tests/integrations")):
        archive = subprocess.run(
            ["git", "archive", commit, path], cwd=ROOT, check=True, capture_output=True
        )
        subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
    packages = f"{ROOT / 'src'}{os.pathsep}{folder}"
    environment = {**os.environ, "PYTHONPATH": packages, "HF_HUB_OFFLINE": "1", "CI": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", ROUNDS, only],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        for line in process.stdout or ():
            if line.startswith("ANSWER "):
                name, label, verdict = json.loads(line.removeprefix("ANSWER "))
                yield name, label, *told(verdict)


def of_folder(folder: Path, only: str, seconds: int) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, label, answer and words of the loops in a folder."""
    for name, label in labels_of(folder).items():
        if only in name:
            yield name, label, *answer(folder.resolve(), name, seconds)


def of_scripts(folder: Path, only: str, seconds: int) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, label, answer and words of the 84 scripts."""
    path = "benchmarks/unseen_loops"
    archive = subprocess.run(
        ["git", "archive", SCRIPTS, path], cwd=ROOT, check=True, capture_output=True
    )
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
    yield from of_folder(folder / path, only, seconds)


def column_of(label: str, found: str) -> str:
    """Return the column of the table into which an answer falls."""
    if found in ("crash", "not judged"):
        return found
    if label == "right":
        return "right" if found == "right" else "false alarm"
    return "called right" if found == "right" else "named" if found == label else "other cause"


COLUMNS = ("right", "false alarm", "named", "other cause", "called right", "not judged", "crash")
ROWS = {
    "right, called right": ("right", "right"),
    "right, not judged": ("right", "not judged"),
    "right, called wrong": ("right", "false alarm"),
    "mistake, found and named": ("mistake", "named"),
    "mistake, found, another cause or none named": ("mistake", "other cause"),
    "mistake, not judged": ("mistake", "not judged"),
    "mistake, called right": ("mistake", "called right"),
    "crashed": ("", "crash"),
}


def counted(
    answers: Iterator[tuple[str, str, str, str]], *, words: bool
) -> Counter[tuple[str, str]]:
    """Print every answer, and return how many fall into each column, by kind of label."""
    counts: Counter[tuple[str, str]] = Counter()
    for name, label, found, said in answers:
        column = column_of(label, found)
        kind = "" if column == "crash" else "right" if label == "right" else "mistake"
        counts[kind, column] += 1
        print(f"{name:52} {found:26} {'' if found == label else label}", flush=True)
        if words and found != label:
            print(f"    {said}")
    return counts


def write(tables: dict[str, Counter[tuple[str, str]]]) -> None:
    """Write the tables into the page, between its marks."""
    parts = []
    for title, counts in tables.items():
        rows = [f"| {row} | {counts[key]} |" for row, key in ROWS.items()]
        parts.append("\n".join([f"| {counts.total()} {title} | today |", "|---|---:|", *rows]))
    start, _, rest = PAGE.read_text(encoding="utf-8").partition("<!-- figures -->")
    end = rest.partition("<!-- end -->")[2]
    made = f"<!-- figures -->\n{date.today()}\n\n" + "\n\n".join(parts) + "\n\n<!-- end -->"
    PAGE.write_text(start + made + end, encoding="utf-8")


def cost() -> str:
    """Return what a watch adds to a window of 4 micro-batches of 12 layers of 256.

    Windows with and without it take turns, in processor time; the fastest of each counts.
    """
    import time

    import torch
    from torch import nn
    from torch.nn import functional as F

    import wholebatch as wb

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    micros = [(torch.randn(64, 256), torch.randint(0, 10, (64,))) for _ in range(4)]

    def seconds() -> float:
        began = time.process_time()
        for x, y in micros:
            (F.cross_entropy(model(x), y) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - began

    plain, recorded, counted = [], [], []
    for _ in range(8):
        plain += [seconds() for _ in range(12)]
        with wb.watch(model, optimizer):
            recorded += [seconds() for _ in range(8)]
            counted += [seconds() for _ in range(12)]
    alone, full, brief = (1e3 * min(row) for row in (plain, recorded, counted))
    return (
        f"a window takes {alone:.1f} ms, {full:.1f} ms recorded ({full / alone:.2f} times), and "
        f"{brief:.1f} ms counted ({100 * (brief / alone - 1):+.1f}%)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--history", action="store_true", help="loops of the repository's history")
    parser.add_argument("--page", action="store_true", help="write the figures of --history")
    parser.add_argument("--only", default="", help="part of the names")
    parser.add_argument("--seconds", type=int, default=300, help="limit of one loop")
    parser.add_argument("--words", action="store_true", help="print verdicts that are not wanted")
    parser.add_argument("--targets", action="store_true", help="fail where a target is missed")
    parser.add_argument("--cost", action="store_true", help="print what a watch adds to a window")
    options = parser.parse_args()
    if options.cost:
        print(cost())
        return 0
    if options.history == (options.folder is not None):
        parser.error("give a folder, or --history")
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if options.history:
            made = {
                "loops of earlier rounds": of_earlier_rounds(folder, options.only),
                "scripts, labelled unseen": of_scripts(folder, options.only, options.seconds),
            }
        else:
            made = {"loops": of_folder(options.folder, options.only, options.seconds)}
        tables = {name: counted(answers, words=options.words) for name, answers in made.items()}
    if options.page and options.history:
        write(tables)
    missed = []
    for name, counts in tables.items():
        total = counts.total()
        print(f"\n{total} {name}")
        for column in COLUMNS:
            number = sum(n for (_, one), n in counts.items() if one == column)
            print(f"{column:14} {number}")
            missed += [f"{column} of {name}"] * (number > TARGETS.get(column, 1.0) * total)
    if options.targets and missed:
        print(f"above its target: {', '.join(missed)}")
    return int(options.targets and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
