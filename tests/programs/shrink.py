"""Make a failing program smaller: plainer fields, fewer windows and micro-batches, fewer rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from tests.programs.description import Micro, Program


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Return a program that still fails, where nothing plainer that was tried does."""
    goes_on = True
    while goes_on:
        goes_on = False
        for smaller in _smaller(program):
            if fails(smaller):
                program, goes_on = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Yield programs that are plainer in one thing, the largest steps first."""
    for window in program.windows if len(program.windows) > 1 else ():
        yield replace(program, windows=(window,), at=0)
    for field in fields(program):
        if field.name not in ("windows", "mistake") and getattr(program, field.name) != (
            field.default
        ):
            yield replace(program, **{field.name: field.default})
    for number, window in enumerate(program.windows):
        for place, micro in enumerate(window):
            without = (*window[:place], *window[place + 1 :])
            plainer = [without] if without else []
            plainer += [
                (*window[:place], other, *window[place + 1 :])
                for other in (Micro(micro.rows - 1, micro.labels), Micro(micro.rows))
                if other.rows > 0 and other != micro
            ]
            for changed in plainer:
                windows = (*program.windows[:number], changed, *program.windows[number + 1 :])
                yield replace(program, windows=windows)
