"""Draw loops until the time is up; print what the judges disagree in, each as plain as it gets."""

from __future__ import annotations

import time
from collections import Counter
from multiprocessing import get_context
from random import Random
from typing import Any

from tests.programs.plain.grammar import LIBRARIES, draw, label, plainest
from tests.programs.plain.judge import (
    Judgement,
    is_linted,
    is_named,
    judge,
    warm_up,
)
from tests.programs.plain.text import script

_SHRINKS_FOR = 10.0
"""Seconds that a failure is made plainer."""


def work(number: int, jobs: int, seed: int, seconds: float, tell: Any) -> None:
    """Draw loops until the time is up; tell of each, and of each new failure."""
    ends = time.monotonic() + seconds
    warm_up(LIBRARIES)
    known: set[str] = set()
    place = number
    while time.monotonic() < ends:
        judged = judge(draw(Random(f"{seed} {place}")))
        tell.put((place, judged, is_named(judged), is_linted(judged)))
        if judged.failure and judged.failure not in known:
            known.add(judged.failure)
            tell.put((place, _plainest(judged), None, None))
        place += jobs
    tell.put(None)


def _plainest(judged: Judgement) -> Judgement:
    until, smallest = time.monotonic() + _SHRINKS_FOR, judged

    def fails(loop: Any) -> bool:
        nonlocal smallest
        if time.monotonic() > until:
            return False
        other = judge(loop)
        if other.failure == judged.failure:
            smallest = other
        return other.failure == judged.failure

    plainest(judged.loop, fails)
    return smallest


def search(seconds: float, seed: int, jobs: int, *, shows: bool = True) -> int:
    """Run the grammar in several processes; the status is 1 if the judges disagree."""
    context = get_context("spawn")
    tell = context.SimpleQueue()
    workers = [
        context.Process(target=work, args=(number, jobs, seed, seconds, tell))
        for number in range(jobs)
    ]
    for worker in workers:
        worker.start()
    print(f"seed {seed}, {jobs} processes", flush=True)
    verdicts: dict[str, Counter[str]] = {}
    failures: Counter[str] = Counter()
    plain: dict[str, tuple[int, Judgement]] = {}
    open_ = jobs
    while open_:
        if (answer := tell.get()) is None:
            open_ -= 1
            continue
        place, judged, named, linted = answer
        if named is None:
            plain.setdefault(judged.failure, (place, judged))
            continue
        row = verdicts.setdefault(label(judged.loop), Counter())
        row["loops"] += 1
        row[judged.answers.verdict if judged.answers else "broken"] += 1
        row["named"] += named
        row["linted"] += linted
        row["lint errors"] += bool(judged.answers and judged.answers.errors)
        if judged.failure:
            failures[judged.failure] += 1
            plain.setdefault(judged.failure, (place, judged))
    _table(verdicts)
    for failure, many in failures.most_common():
        place, judged = plain[failure]
        print(f"\nFAILED {many} times: {failure}\n(seed {seed}, loop {place}) {judged.loop}")
        if shows:
            print(f"{judged.detail}\n{'-' * 80}\n{script(judged.loop)}{'=' * 80}")
    print(f"{sum(failures.values())} disagreements in {len(failures)} kinds")
    return 1 if failures else 0


def _table(verdicts: dict[str, Counter[str]]) -> None:
    """Print, for each kind of loop, what verify and lint say of it."""
    columns = ("loops", "same", "wrong", "not judged", "broken", "named", "linted", "lint errors")
    print(f"{'':32}" + "".join(f"{name:>13}" for name in columns))
    total: Counter[str] = Counter()
    for name, row in sorted(verdicts.items(), key=lambda pair: (pair[0] != "right", pair[0])):
        print(f"{name:32}" + "".join(f"{row[column]:13}" for column in columns))
        total += row
    print(f"{'all':32}" + "".join(f"{total[column]:13}" for column in columns), flush=True)
