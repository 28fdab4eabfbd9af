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

from tests.programs.frame import Judged, Machine, search
from tests.programs.plain import grammar as plain_grammar
from tests.programs.plain import judge as plain_judge
from tests.programs.plain.text import script as plain_script


def of_programs(device: str, kind: str) -> Machine:
    """Return the grammar of programs with wholebatch, judged by the undivided batch."""
    from tests.programs.description import Program
    from tests.programs.grammar import draw, kind_of
    from tests.programs.hosts import HOSTS
    from tests.programs.judge import KINDS, judge
    from tests.programs.run import warm_up
    from tests.programs.script import script
    from tests.programs.shrink import smaller

    warm_up(script(Program()), script(Program(way="run")))
    warm = {"eager"}

    def judged(program: Program) -> Judged:
        host = program.way if program.way in HOSTS else program.execute
        if host not in warm:  # imports of seconds, made once
            warm.add(host)
            warm_up(script(program))
        verdict = judge(program)
        failure = verdict.signature if verdict.failed else ""
        return Judged(program, kind_of(program), (verdict.kind,), failure, verdict.detail)

    of_kind = partial(draw, device=device, kind=kind)
    return Machine(KINDS, of_kind, judged, smaller, script)


def of_loops() -> Machine:
    """Return the grammar of loops in plain torch, judged by lint and verify too."""
    plain_judge.warm_up(plain_grammar.LIBRARIES)
    return Machine(
        plain_judge.COLUMNS,
        plain_grammar.draw,
        plain_judge.judged,
        plain_grammar.smaller,
        plain_script,
    )


def main() -> int:
    """Run a machine for a while; the exit status is 1 if a value failed."""
    from tests.programs.grammar import KINDS

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
    make = (
        of_loops if options.way == "plain" else partial(of_programs, options.device, options.kind)
    )
    return search(make, options.seconds, options.seed, options.jobs, options.first)


if __name__ == "__main__":
    from tests.programs.__main__ import main as named  # spawned processes find it by this name

    sys.exit(named())
