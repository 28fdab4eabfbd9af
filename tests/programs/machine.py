"""What a search needs of the programs with wholebatch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from tests.programs.description import Micro, Program
from tests.programs.frame import Judged, Machine, plainer
from tests.programs.grammar import draw, kind_of
from tests.programs.hosts import HOSTS
from tests.programs.judge import judge
from tests.programs.run import warm_up
from tests.programs.script import script


def machine(device: str, kind: str) -> Machine:
    """Return the grammar of programs, judged by the undivided batch."""
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

    return Machine(partial(draw, device=device, kind=kind), judged, smaller, script)


def smaller(program: Program) -> Iterator[Program]:
    """Yield programs that are plainer in one thing, the largest steps first."""
    for window in program.windows if len(program.windows) > 1 else ():
        yield replace(program, windows=(window,), at=0)
    yield from plainer(program)
    for number, window in enumerate(program.windows):
        for place, micro in enumerate(window):
            before, after = window[:place], window[place + 1 :]
            others = [(*before, *after)] if len(window) > 1 else []
            others += [
                (*before, other, *after)
                for other in (Micro(micro.rows - 1, micro.labels), Micro(micro.rows))
                if other.rows > 0 and other != micro
            ]
            for changed in others:
                windows = (*program.windows[:number], changed, *program.windows[number + 1 :])
                yield replace(program, windows=windows)
