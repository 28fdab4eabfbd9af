"""Programs that are smaller than one that fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.programs.description import Micro, Program
from tests.programs.frame import plainer


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
