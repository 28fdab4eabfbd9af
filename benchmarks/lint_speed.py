"""How long the linter takes over a tree: `wholebatch lint` on 5,000 generated files.

    python benchmarks/lint_speed.py [--files 5000] [--training 0.2] [--jobs N] [--json PATH]

The tree is made fresh: a share of training scripts (about 150 lines with an accumulating loop,
helpers and settings, each with other names, so that nothing can be cached) among ordinary modules
of the same size. The time is that of the whole command in a process of its own, start included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 20.0
LIMIT_FILES = 5000

TRAINING = '''"""Training script number {n}."""
import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader


def loss_{n}(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def train_{n}(args, model, optimizer, scheduler, loader_{n}):
    running_{n} = 0.0
    updates_{n} = 0
    for epoch in range(args.epochs):
        for step_{n}, batch in enumerate(loader_{n}):
            loss = loss_{n}(model, batch)
            loss = loss / args.accumulation_steps
            loss.backward()
            running_{n} += loss.item()
            if (step_{n} + 1) % args.accumulation_steps == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                updates_{n} += 1
                if updates_{n} % args.log_every == 0:
                    print(epoch, updates_{n}, running_{n} / args.log_every)
                    running_{n} = 0.0
    return updates_{n}


'''
ORDINARY = '''"""Module number {n}."""
from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass
class Record{n}:
    name: str
    values: list[float]

    def mean(self) -> float:
        return sum(self.values) / max(1, len(self.values))


'''
FILLER = '''def helper_{n}_{k}(items, limit={k}):
    """Keeps what is below the limit."""
    kept = []
    for index, item in enumerate(items):
        if item is None or index % 7 == 3:
            continue
        value = item * {k} + index
        if value < limit:
            kept.append(value)
        else:
            kept.append(limit)
    return kept


'''


def make_tree(root: Path, files: int, training: float) -> int:
    """Writes the files, a hundred to a folder, and returns how many are training scripts."""
    every = round(1 / training) if training > 0 else files + 1
    scripts = 0
    for n in range(files):
        folder = root / f"part_{n // 100:03}"
        folder.mkdir(exist_ok=True)
        is_script = n % every == 0
        scripts += is_script
        body = (TRAINING if is_script else ORDINARY).format(n=n)
        body += "".join(FILLER.format(n=n, k=k) for k in range(8 if is_script else 9))
        (folder / f"module_{n}.py").write_text(body)
    return scripts


def measure(files: int, training: float, jobs: int | None) -> dict[str, Any]:
    """One timed run of the command over a fresh tree."""
    with tempfile.TemporaryDirectory() as folder:
        scripts = make_tree(Path(folder), files, training)
        command = [sys.executable, "-m", "wholebatch.lint", folder, "--format", "json"]
        if jobs is not None:
            command += ["--jobs", str(jobs)]
        source = str(Path(__file__).parents[1] / "src")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.perf_counter()
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": source},
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    findings = json.loads(done.stdout)
    return {
        "files": files,
        "training_scripts": scripts,
        "findings": len(findings),
        "seconds": round(seconds, 2),
        # What the machine worked for it, whatever else it did at the time.
        "cpu_seconds": round(
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2
        ),
        "files_per_second": round(files / seconds),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "python": platform.python_version(),
    }


def main() -> int:
    """Prints the result; 1 when a full tree takes longer than the limit or finds nothing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=LIMIT_FILES)
    parser.add_argument("--training", type=float, default=0.2, help="share of training scripts")
    parser.add_argument("--jobs", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    result = measure(given.files, given.training, given.jobs)
    print(json.dumps(result, indent=2))
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=2) + "\n")
    slow = given.files >= LIMIT_FILES and result["seconds"] > LIMIT_SECONDS
    return 1 if slow or result["findings"] < result["training_scripts"] else 0


if __name__ == "__main__":
    sys.exit(main())
