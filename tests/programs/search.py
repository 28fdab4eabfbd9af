"""Draw programs until the time is up, and make each one that fails as small as it gets."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.programs.description import Program
from tests.programs.grammar import kind_of, programs
from tests.programs.hosts import HOSTS
from tests.programs.judge import Verdict, judge
from tests.programs.run import warm_up
from tests.programs.script import script
from tests.programs.shrink import shrink

_SHRINKS_FOR = 25.0
"""Seconds that a failure is made smaller."""


@dataclass
class Search:
    """The programs of one process: it draws them until its time is up, and shrinks each failure."""

    number: int
    seconds: float
    tell: Any
    """A queue for (kind of program, verdict, signature or failure)."""
    known: Path
    """A folder that all processes share, with a file for each failure that one of them shrinks."""
    device: str = "cpu"
    kind: str = "all"
    warm: set[str] = field(default_factory=lambda: {"eager"})

    def run(self, seed: int) -> None:
        """Draw one program after the other, each with a seed of its own."""
        ends, number = time.monotonic() + self.seconds, 0
        draw = programs(device=self.device, kind=self.kind)
        while time.monotonic() < ends:
            program = draw(Random(f"{seed} {number}"))
            verdict, number = self._judge(program), number + 1
            signature = verdict.signature if verdict.failed else None
            self.tell.put((kind_of(program), verdict.kind, signature))
            if verdict.failed and self._is_new(verdict.signature):
                kind = kind_of(program)
                program, verdict = self._smallest(program, verdict)
                self.tell.put((kind, None, (repr(program), script(program), verdict)))

    def _judge(self, program: Program) -> Verdict:
        host = program.way if program.way in HOSTS else program.execute
        if host not in self.warm:  # imports of seconds, made once
            self.warm.add(host)
            warm_up(script(program))
        return judge(program)

    def _smallest(self, program: Program, verdict: Verdict) -> tuple[Program, Verdict]:
        """Return the smallest program that fails alike, and what became of it."""
        until, smallest = time.monotonic() + _SHRINKS_FOR, verdict

        def fails(smaller: Program) -> bool:
            nonlocal smallest
            if time.monotonic() > until:
                return False
            try:
                other = judge(smaller)
            except Exception:  # no program: the grammar does not draw such a one
                return False
            if other.signature == verdict.signature:
                smallest = other
            return other.signature == verdict.signature

        return shrink(program, fails), smallest

    def _is_new(self, signature: str) -> bool:
        """Return whether no process has seen this failure yet, and say that this one has."""
        try:
            (self.known / hashlib.md5(signature.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def work(
    number: int, first_seed: int, seconds: float, device: str, kind: str, known: Path, tell: Any
) -> None:
    """Search until the time is up."""
    ends = time.monotonic() + seconds
    warm_up(script(Program()), script(Program(way="run")))
    Search(number, ends - time.monotonic(), tell, known, device, kind).run(first_seed + number)
    tell.put(("", "done", None))
