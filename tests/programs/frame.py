"""What both grammars share: values that get plainer, and a search for those that fail."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from multiprocessing import get_context
from random import Random
from typing import Any, TypeVar

_SHRINKS_FOR = 25.0
"""Seconds that a failure is made smaller."""

V = TypeVar("V")


@dataclass(frozen=True)
class Value:
    """A value of a grammar. The first value of every field is the plainest one."""

    def __repr__(self) -> str:
        """Return the call that makes it, with the fields that are not the plainest."""
        listed = [f"{name}={getattr(self, name)!r}" for name in changed(self)]
        return f"{type(self).__name__}({', '.join(listed)})"


def changed(value: Any) -> list[str]:
    """Return the fields that are not the plainest."""
    return [f.name for f in fields(value) if getattr(value, f.name) != f.default]


def plainer(value: V) -> Iterator[V]:
    """Yield the value with one field the plainest; its mistake stays."""
    defaults = {f.name: f.default for f in fields(value)}  # type: ignore[arg-type]
    for name in changed(value):
        if name not in ("windows", "mistake"):
            yield replace(value, **{name: defaults[name]})  # type: ignore[type-var]


def shrink(value: V, smaller: Callable[[V], Iterator[V]], fails: Callable[[V], bool]) -> V:
    """Return a value that still fails, where nothing smaller that was tried does."""
    goes_on = True
    while goes_on:
        goes_on = False
        for other in smaller(value):
            if fails(other):
                value, goes_on = other, True
                break
    return value


@dataclass(frozen=True)
class Judged:
    """What became of a value; `failure` is the same for the same defect."""

    value: Any
    kind: str
    """The row of the table that counts it."""
    columns: tuple[str, ...]
    """The columns that count it."""
    failure: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Machine:
    """A grammar with its judge."""

    draw: Callable[[Random], Any]
    judge: Callable[[Any], Judged]
    smaller: Callable[[Any], Iterator[Any]]
    text: Callable[[Any], str]


def _smallest(machine: Machine, judged: Judged) -> Judged:
    until, smallest = time.monotonic() + _SHRINKS_FOR, judged

    def fails(value: Any) -> bool:
        nonlocal smallest
        if time.monotonic() > until:
            return False
        try:
            other = machine.judge(value)
        except Exception:  # no program: the grammar does not draw such a one
            return False
        if other.failure == judged.failure:
            smallest = other
        return other.failure == judged.failure

    shrink(judged.value, machine.smaller, fails)
    return smallest


def _work(
    make: Callable[[], Machine], number: int, jobs: int, seed: int, seconds: float, tell: Any
) -> None:
    """Draw until the time is up, each value with a seed of its own; tell of each."""
    machine, ends, known, place = make(), time.monotonic() + seconds, set[str](), number
    while time.monotonic() < ends:
        judged = machine.judge(machine.draw(Random(f"{seed} {place}")))
        tell.put((place, judged, True))
        if judged.failure and judged.failure not in known:
            known.add(judged.failure)
            smallest = _smallest(machine, judged)
            text = f"{smallest.detail.strip()[-1500:]}\n{'-' * 80}\n{machine.text(smallest.value)}"
            tell.put((place, replace(smallest, detail=text), False))
        place += jobs
    tell.put(None)


def search(
    make: Callable[[], Machine], seconds: float, seed: int, jobs: int, first: bool = False
) -> int:
    """Search in several processes, and print what fails; the status is 1 if something does.

    With `first`, stop at the first failure.
    """
    context = get_context("spawn")
    tell = context.SimpleQueue()
    workers = [
        context.Process(target=_work, args=(make, number, jobs, seed, seconds, tell))
        for number in range(jobs)
    ]
    for worker in workers:
        worker.start()
    print(f"seed {seed}, {jobs} processes", flush=True)
    rows: dict[str, Counter[str]] = {}
    failures: Counter[str] = Counter()
    smallest: dict[str, tuple[int, Judged]] = {}
    open_, shown, started = jobs, 0.0, time.monotonic()
    while open_ and not (first and failures):
        if (answer := tell.get()) is None:
            open_ -= 1
            continue
        place, judged, is_drawn = answer
        if judged.failure:
            failures[judged.failure] += is_drawn
            smallest[judged.failure] = smallest.get(judged.failure, (place, judged))
        if not is_drawn:
            smallest[judged.failure] = (place, judged)
            continue
        rows.setdefault(judged.kind, Counter())["drawn"] += 1
        rows[judged.kind].update(judged.columns)
        if time.monotonic() - shown > 20.0:
            shown = time.monotonic()
            many = sum(row["drawn"] for row in rows.values())
            left = max(0.0, seconds - (shown - started))
            print(f"{many} drawn, {sum(failures.values())} fail, {left:.0f} s left", flush=True)
    for worker in workers if open_ else []:
        worker.terminate()
    _print_table(rows)
    for failure, many in failures.most_common():
        place, judged = smallest[failure]
        print(f"\nFAILED {many} times: {failure}\n(seed {seed}, number {place}) {judged.value!r}")
        print(judged.detail)
    print(f"{sum(failures.values())} failures of {len(failures)} kinds")
    return 1 if failures else 0


def _print_table(rows: dict[str, Counter[str]]) -> None:
    """Print how often each kind was drawn, and what became of it."""
    total = sum(rows.values(), Counter[str]())
    columns = [name for name, _ in total.most_common()]
    print(f"{'':32}" + "".join(f"{name:>13}" for name in columns))
    for name, row in [*sorted(rows.items()), ("all", total)]:
        print(f"{name:32}" + "".join(f"{row[column]:13}" for column in columns), flush=True)
