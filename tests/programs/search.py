"""Draw programs until the time is up, and let Hypothesis shrink each one that fails."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from tests.programs.description import Program
from tests.programs.grammar import programs
from tests.programs.hosts import HOSTS
from tests.programs.judge import Verdict, judge
from tests.programs.run import warm_up
from tests.programs.script import script


class Failed(Exception):
    """A program fails; Hypothesis looks for a smaller one that fails alike."""


@dataclass
class Search:
    """The programs of one process: it draws them until its time is up, and shrinks each failure."""

    number: int
    seconds: float
    tell: Any
    """A queue for (process, kind, signature or failure)."""
    known: Path
    """A folder that all processes share, with a file for each failure that one of them shrinks."""
    device: str = "cpu"
    kind: str = "all"
    warm: set[str] = field(default_factory=lambda: {"eager"})

    def __post_init__(self) -> None:
        self.ends = time.monotonic() + self.seconds
        self.target: str | None = None
        self.shrinks_until = self.ends
        self.smallest: tuple[Program, Verdict] | None = None

    def run(self, first_seed: int, many: int = 100) -> None:
        """Draw `many` programs after the other, each lot with a seed of its own."""
        lot = first_seed
        while time.monotonic() < self.ends:
            self.target, self.smallest = None, None
            test = settings(
                max_examples=many,
                deadline=None,
                database=None,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
                verbosity=Verbosity.quiet,
                report_multiple_bugs=False,
            )(seed(lot)(given(programs(device=self.device, kind=self.kind))(self._test)))
            try:
                test()
            except Exception as problem:
                if self.smallest is None:
                    raise problem
                program, found = self.smallest
                self.tell.put((self.number, None, (repr(program), script(program), found)))
            lot += 1000

    def _test(self, program: Program) -> None:
        if time.monotonic() > self.ends + (30 if self.target else 0):
            return
        if self.target is not None and time.monotonic() > self.shrinks_until:
            return
        host = program.way if program.way in HOSTS else program.execute
        if host not in self.warm:  # imports of seconds, made once
            self.warm.add(host)
            warm_up(script(program))
        found = judge(program)
        if self.target is None:
            self.tell.put((self.number, found.kind, found.signature if found.failed else None))
            if not found.failed or not self._is_new(found.signature):
                return
            self.target = found.signature
            self.shrinks_until = time.monotonic() + 25
        if found.failed and found.signature == self.target:
            self.smallest = (program, found)
            raise Failed(found.signature)

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
    tell.put((number, "done", None))
