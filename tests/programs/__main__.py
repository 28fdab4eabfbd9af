"""`make programs`: write programs, run them, and print the smallest of each kind that fails.

python -m tests.programs --seconds 600 --seed 1
python -m tests.programs --way plain     # training loops without wholebatch, for lint and verify
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial

from tests.programs.frame import search
from tests.programs.grammar import KINDS
from tests.programs.machine import machine
from tests.programs.plain.judge import machine as machine_of_loops


def main() -> int:
    """Run a machine for a while; the exit status is 1 if a value failed."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kind", choices=("all", *KINDS), default="all")
    parser.add_argument("--way", choices=("wholebatch", "plain"), default="wholebatch")
    options = parser.parse_args()
    if options.device == "cpu":  # a process with CUDA cannot fork one that trains
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["JAX_PLATFORMS"] = "cpu"
    make = partial(machine, options.device, options.kind)
    make = machine_of_loops if options.way == "plain" else make
    return search(make, options.seconds, options.seed, options.jobs, options.first)


if __name__ == "__main__":
    from tests.programs.__main__ import main as named  # spawned processes find it by this name

    sys.exit(named())
