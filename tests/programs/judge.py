"""Compare what a program did with the truth, and give the result a name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

from tests.programs.description import LOOPS, Program
from tests.programs.mistakes import MISTAKES, ONE_ROW
from tests.programs.oracle import Window, truth
from tests.programs.run import Outcome, in_fork, run
from tests.programs.script import script

TOLERANCE = {"float64": 1e-10, "float32": 2e-4, "bf16": 6e-2, "fp16": 2e-2}
KINDS = ("exact", "refused", "warned", "listed", "silent", "traceback")


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
    if outcome.error is not None:
        if not outcome.refused:
            return Verdict("traceback", True, _key("traceback", outcome.error), outcome.traceback)
        if planted:
            return Verdict("refused", detail=outcome.error)
        return Verdict("refused", True, _key("refused", outcome.error), outcome.error)
    # torch.optim asks for CUDA, and the next fork of a process that did cannot use it.
    right = truth(program) if program.device == "cpu" else in_fork(lambda: truth(program))
    difference = compare(program, right, outcome.windows)
    if difference is None:
        kind = "warned" if outcome.said else "exact"
        return Verdict(kind, detail="\n".join(outcome.said))
    if planted and outcome.said:
        return Verdict("warned", detail="\n".join(outcome.said))
    if planted and program.in_one_row and program.way not in LOOPS:
        return Verdict("listed", detail=ONE_ROW)
    if planted and program.way in MISTAKES[program.mistake].listed:
        return Verdict("listed", detail=MISTAKES[program.mistake].listed[program.way])
    what = f"{program.mistake} in {program.way}" if planted else difference.split(":")[0]
    return Verdict("silent", True, f"silent: {what}", difference)


def _key(kind: str, error: str) -> str:
    """Return the error without what differs between two programs."""
    return f"{kind}: {re.sub(r'[-0-9.e]*[0-9][-0-9.e]*', '#', error)[:70]}"


def compare(program: Program, right: list[Window], seen: list[Window]) -> str | None:
    """Return the first difference in words, or None."""
    if program.way == "keras":  # `fit` reports once, at its end
        right = right[-1:]
    if len(right) != len(seen):
        return f"number of windows: {len(seen)} instead of {len(right)}"
    allowed = TOLERANCE[program.precision]
    last: torch.Tensor | None = None
    largest = 1e-3  # of the updates so far: their rounding stays in the parameters
    for number, (expected, given) in enumerate(zip(right, seen, strict=True)):
        if program.precision in ("bf16", "fp16"):  # later windows begin from rounded parameters
            allowed = TOLERANCE[program.precision] * (1 + 2 * number)
        for name in ("skipped",) if program.way == "gradient" else ("update", "skipped"):
            if expected[name] != given.get(name, expected[name]):
                return f"{name}: {given[name]} instead of {expected[name]} in window {number}"
        # Units that are all wrong by one factor, as the means over them are, cancel.
        told = (
            ("loss", "norm") if program.mistake.startswith("units") else ("units", "loss", "norm")
        )
        for name in () if expected["skipped"] else told:
            if None in (expected[name], given.get(name)):
                continue
            if _off(expected[name], given[name]) > allowed:
                return f"{name}: {given[name]} instead of {expected[name]} in window {number}"
        for one, other in zip(expected["rate"], given.get("rate", expected["rate"]), strict=True):
            if _off(one, other) > 1e-12:
                return f"rate: {given['rate']} instead of {expected['rate']} in window {number}"
        now = torch.tensor(given["parameters"], dtype=torch.float64)
        moved = expected["parameters"] if last is None else expected["parameters"] - last
        distance = float((now - expected["parameters"]).norm())
        largest = max(largest, float(moved.norm()))
        if not distance <= allowed * largest:
            return f"parameters: the update of window {number} is {distance:.1e} off"
        last = expected["parameters"]
        if "ema" in expected:
            ema = torch.tensor(given["ema"], dtype=torch.float64)
            if not float((ema - expected["ema"]).norm()) <= allowed * largest:
                return f"ema: of window {number}"
    return None


def _off(expected: float, given: float) -> float:
    """Return the relative difference; inf where one is not a number."""
    if not (math.isfinite(expected) and math.isfinite(given)):
        return math.inf
    return abs(expected - given) / max(abs(expected), 1e-3)
