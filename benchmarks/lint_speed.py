"""Time of the linter over a tree of files, and over one file of many loops.

    python benchmarks/lint_speed.py [--files 400] [--loops 2000]

The tree is made fresh: one file of five is a training script with an accumulating loop, a helper
and settings, each with other names, so that nothing can be cached. The others are ordinary modules.
The times are processor seconds of the whole command in a process of its own, start included.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

LOOP = """
def loss_{n}(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def train_{n}(args, model, optimizer, scheduler, loader):
    for epoch in range(args.epochs):
        for step_{n}, batch in enumerate(loader):
            loss = loss_{n}(model, batch) / args.accumulation_steps
            loss.backward()
            if (step_{n} + 1) % args.accumulation_steps == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
"""
PLAIN = """
class Layer{n}:
    def __init__(self, width, depth):
        self.width, self.depth = width, depth

    def forward(self, x):
        for index in range(self.depth):
            x = x * self.width + index
        return x
"""
IMPORTS = "import torch\nimport torch.nn.functional as F\n"
TRAINING_SHARE = 5


def seconds(*paths: Path) -> float:
    """Return the processor seconds of one run of the linter."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "wholebatch.lint", "--exit-zero", *map(str, paths)]
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print both times."""
    parser = argparse.ArgumentParser(description="Time the linter.")
    parser.add_argument("--files", type=int, default=400)
    parser.add_argument("--loops", type=int, default=2000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        for n in range(given.files):
            body = (LOOP if n % TRAINING_SHARE == 0 else PLAIN).format(n=n)
            filler = "".join(PLAIN.format(n=f"{n}_{k}") for k in range(12))
            (tree / f"module_{n}.py").write_text(IMPORTS + body + filler, encoding="utf-8")
        print(f"{given.files} files: {seconds(tree):.1f} s")
        many = Path(folder) / "many.py"
        loops = "".join(LOOP.format(n=n) for n in range(given.loops))
        many.write_text(IMPORTS + loops, encoding="utf-8")
        print(f"{given.loops} loops in one file: {seconds(many):.1f} s")


if __name__ == "__main__":
    main()
