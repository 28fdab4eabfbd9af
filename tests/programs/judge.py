"""Compare what a program did with the truth, and give the result a name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import takewhile

import torch

from tests.programs.description import LOOPS, Program
from tests.programs.mistakes import LATER, ONE_ROW, SIZE, mistake_of
from tests.programs.oracle import Window, truth
from tests.programs.run import Outcome, in_fork, run
from tests.programs.script import script

ROUNDING = {"float64": 1e-10, "float32": 2e-5, "bf16": 1e-2, "fp16": 2e-3}
"""What the numbers of a window may be off by in any program."""
_SEVERAL = 4.0
"""The distances of the undivided batch in the program's precision that ours may have."""


@dataclass(frozen=True)
class Verdict:
    """What became of a program; `signature` is the same for the same defect."""

    kind: str
    failed: bool = False
    signature: str = ""
    detail: str = ""


def judge(program: Program) -> Verdict:
    """Write the program, run it, and compare it with the truth."""
    return verdict(program, run(script(program)))


def verdict(program: Program, outcome: Outcome) -> Verdict:
    """Return what became of a program that has run."""
    planted = program.mistake != "none"
    if outcome.error is not None and not outcome.refused:
        return Verdict("traceback", True, _key("traceback", outcome.error), outcome.traceback)
    if outcome.error is not None and not planted:
        return Verdict("refused", True, _key("refused", outcome.error), outcome.error)
    if outcome.error is not None:
        return _refused(program, outcome, outcome.error)
    difference = compare(program, _true(program), outcome.windows)
    if difference is None:
        kind = "warned" if outcome.said else "exact"
        return Verdict(kind, detail="\n".join(outcome.said))
    if planted and outcome.said:
        return _named(program, "warned", "\n".join(outcome.said))
    if listed := _listed(program):
        return Verdict("listed", detail=listed)
    what = f"{program.mistake} in {program.way}" if planted else difference.split(":")[0]
    return Verdict("silent", True, f"silent: {what}", difference)


def _true(program: Program, precision: str = "float64") -> list[Window]:
    # torch.optim asks for CUDA, and the next fork of a process that did cannot use it.
    alone = program.device != "cpu"
    return in_fork(lambda: truth(program, precision)) if alone else truth(program, precision)  # type: ignore[no-any-return]


def _refused(program: Program, outcome: Outcome, error: str) -> Verdict:
    """A refusal must name the mistake, and it or a warning come before the first wrong update."""
    named = _named(program, "refused", error)
    warned = outcome.said and _named(program, "warned", "\n".join(outcome.said))
    if named.failed or not outcome.windows or _listed(program):
        return named
    if warned and not warned.failed:
        return warned
    right = _true(program)[: len(outcome.windows)]
    if (difference := compare(program, right, outcome.windows)) is not None:
        return Verdict("late", True, f"late: {program.mistake} in {program.way}", difference)
    return named


def _named(program: Program, kind: str, said: str) -> Verdict:
    if re.search(mistake_of(program).words, said, re.IGNORECASE | re.DOTALL):
        return Verdict(kind, detail=said)
    return Verdict("unnamed", True, f"unnamed: {program.mistake} in {program.way}", said)


SEEN_LIKE = {"accelerate": "backward", "fabric": "backward", "lightning": "run", "trainer": "run"}
"""The way in whose tests a library's loop has."""


def _listed(program: Program) -> str:
    """Return the words of docs/laws.md that name the program's mistake, if any."""
    if program.mistake == "none":
        return ""
    if len(program.windows[0]) == 1:
        return ONE_ROW
    in_rows = program.in_one_row or (program.way == "run" and program.begins_in_single_rows)
    if in_rows and program.way not in LOOPS:
        return ONE_ROW
    sizes = {3, 5, *(micro.rows for window in program.windows for micro in window)}
    steps = max(map(len, program.windows))
    if program.mistake == "divided by steps" and program.given == "total" and steps in sizes:
        return SIZE
    way = SEEN_LIKE.get(program.way, program.way)
    listed = mistake_of(program).listed.get(way, "")
    return listed or (LATER if way in LOOPS and program.begins_in_single_rows else "")


def _key(kind: str, error: str) -> str:
    """Return the error without what differs between two programs."""
    return f"{kind}: {re.sub(r'[-0-9.e]*[0-9][-0-9.e]*', '#', error)[:70]}"


def compare(program: Program, right: list[Window], windows: list[Window]) -> str | None:
    """Return the first difference in words, or None.

    Numbers may be off by the rounding of their precision, and by a few times the distance that the
    undivided batch has in it.
    """
    if program.way == "keras":  # `fit` reports once, at its end
        right = right[-1:]
    if program.precision == "fp16" and any(window["skipped"] for window in windows):
        undivided = _true(program, "fp16")  # it may overflow, too: what comes after is the scaler's
        finite = takewhile(lambda window: math.isfinite(window.get("norm", 0.0)), undivided)
        right = right[: len([*finite])]
        windows = windows[: len(right)]
    if len(right) != len(windows):
        return f"number of windows: {len(windows)} instead of {len(right)}"
    for number, (expected, actual) in enumerate(zip(right, windows, strict=True)):
        numbers = (
            ("skipped", "skips") if program.way == "gradient" else ("update", "skipped", "skips")
        )
        for name in numbers:
            if expected[name] != actual.get(name, expected[name]):
                return f"{name}: {actual[name]} instead of {expected[name]} in window {number}"
        for wanted, other in zip(
            expected["rate"], actual.get("rate", expected["rate"]), strict=True
        ):
            if _off(wanted, other) > 1e-12:
                return f"rate: {actual['rate']} instead of {expected['rate']} in window {number}"
        if expected.get("seen") != actual.get("seen", expected.get("seen")):
            return f"buffers: {actual['seen']} instead of {expected['seen']} in window {number}"
    rounded: list[dict[str, float]] | None = None
    for number, ours in enumerate(distances(program, right, windows)):
        rounding = ROUNDING[program.precision] * (1 + 2 * number)
        for name, distance in ours.items():
            if distance <= rounding:
                continue
            if rounded is None and program.precision != "float64":
                undivided = _true(program, program.precision)[: len(right)]
                rounded = distances(program, right, undivided)
            own = _SEVERAL * rounded[number].get(name, 0.0) if rounded is not None else 0.0
            if not distance <= rounding + own:
                return f"{name}: {distance:.1e} off in window {number} ({rounding + own:.1e} is)"
    return None


def distances(
    program: Program, right: list[Window], windows: list[Window]
) -> list[dict[str, float]]:
    """Return how far the numbers of each window are from the right ones, relative to their size."""
    last: torch.Tensor | None = None
    largest = 1e-3  # of the updates so far: their rounding stays in the parameters
    # Units that are all wrong by one factor, as the means over them are, cancel.
    told = ["loss", "norm"] if program.mistake.startswith("units") else ["units", "loss", "norm"]
    told = ["units"] if program.is_random else told
    every = []
    for expected, actual in zip(right, windows, strict=True):
        off = {
            name: _off(expected[name], actual[name])
            for name in ([] if expected["skipped"] else told)
            if None not in (expected[name], actual.get(name))
        }
        every.append(off)
        if program.is_random:
            continue
        moved = expected["parameters"] if last is None else expected["parameters"] - last
        largest, last = max(largest, float(moved.norm())), expected["parameters"]
        for name in ("parameters", "ema"):
            if name in expected:
                now = torch.as_tensor(actual[name], dtype=torch.float64)
                off[name] = float((now - expected[name]).norm()) / largest
    return every


def _off(expected: float, actual: float) -> float:
    """Return the relative difference; inf where one is not a number."""
    if not (math.isfinite(expected) and math.isfinite(actual)):
        return math.inf
    return abs(expected - actual) / max(abs(expected), 1e-3)
