"""The machine itself: its scripts run alone, its oracle is no part of wholebatch, and it finds."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests import processes
from tests.processes import worker
from tests.programs.description import STRUCTURED, TOKEN_MODELS, WHOLE_BATCH, Micro, Program
from tests.programs.found import FOUND
from tests.programs.frame import shrink
from tests.programs.grammar import KINDS, STYLES, draw, models_of
from tests.programs.judge import Verdict, judge, verdict
from tests.programs.machine import smaller
from tests.programs.mistakes import LATER, MISTAKES, ONE_ROW, SIZE, TESTED
from tests.programs.models import CALLS, MODELS, ROW_LOSSES
from tests.programs.run import Outcome, run, warm_up
from tests.programs.script import CLOSE, NAMES, OPTIMIZERS, SCHEDULERS, script

ROOT = Path(__file__).parents[2]
UNEVEN = ((Micro(3), Micro(3), Micro(2, "one")), (Micro(3), Micro(3, "none"), Micro(1)))
SMALL = Program(windows=((Micro(3), Micro(2, "one")), (Micro(3),)), loss="mse")


class Worker:
    """What the tests need of the machine, in a process that may fork."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def run(self, text: str) -> Outcome:
        return self._pool.submit(run, text).result()

    def judge(self, program: Program) -> Verdict:
        return self._pool.submit(judge, program).result()

    def verdict(self, program: Program, outcome: Outcome) -> Verdict:
        return self._pool.submit(verdict, program, outcome).result()


@pytest.fixture(scope="module")
def machine() -> Iterator[Worker]:
    with worker() as pool:
        # Freezes what is imported: else each program would collect its garbage for half a second.
        pool.submit(warm_up, script(SMALL)).result()
        yield Worker(pool)


def test_a_script_runs_alone(machine: Worker, tmp_path: Path) -> None:
    """`python program.py` prints what the fork returns."""
    path = tmp_path / "program.py"
    path.write_text(script(SMALL), encoding="utf-8")
    ended = processes.run(
        path, cwd=tmp_path, environment={**os.environ, **processes.ENVIRONMENT}, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == machine.run(script(SMALL)).windows


def test_the_oracle_imports_nothing_of_ours() -> None:
    for name in ("oracle", "models", "description"):
        text = (ROOT / "tests/programs" / f"{name}.py").read_text(encoding="utf-8")
        assert "import wholebatch" not in text
        assert "from wholebatch" not in text


@pytest.mark.parametrize("name", ["loss", "units", "norm", "update"])
def test_a_wrong_number_is_found(machine: Worker, name: str) -> None:
    outcome = machine.run(script(SMALL))
    assert machine.verdict(SMALL, outcome).kind == "exact"
    wrong = [*outcome.windows]
    wrong[1] = {**wrong[1], name: wrong[1][name] * 1.001}
    verdict = machine.verdict(SMALL, Outcome(wrong))
    assert verdict.failed
    assert verdict.signature == f"silent: {name}"


def test_a_wrong_update_is_found(machine: Worker) -> None:
    outcome = machine.run(script(SMALL))
    wrong = [*outcome.windows]
    parameters = [wrong[0]["parameters"][0] + 1e-9, *wrong[0]["parameters"][1:]]
    wrong[0] = {**wrong[0], "parameters": parameters}
    assert machine.verdict(SMALL, Outcome(wrong)).signature == "silent: parameters"


def test_a_mistake_that_nobody_names_is_found(machine: Worker) -> None:
    planted = replace(SMALL, mistake="mean as total")
    outcome = machine.run(script(planted))
    assert outcome.refused
    assert not machine.verdict(planted, outcome).failed
    unseen = machine.run(script(planted).replace("micro_batch=", "audit=False, micro_batch="))
    assert machine.verdict(planted, unseen).signature == "silent: mean as total in step"


def test_a_failure_is_made_small() -> None:
    program = Program("attention", UNEVEN, way="run", clip="norm", close=("sync",), seed=7)
    smallest = shrink(program, smaller, lambda p: p.clip == "norm" and p.micro_batch > 1)
    assert smallest == Program(windows=((Micro(2),),), clip="norm")


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_draws_one_program(kind: str) -> None:
    drawn = [draw(Random(f"1 {number}"), kind=kind) for number in range(20)]
    assert drawn == [draw(Random(f"1 {number}"), kind=kind) for number in range(20)]
    assert len(set(drawn)) > 10


def covering() -> Iterator[Program]:
    """Yield a right program with each value of each field; the ways in take turns."""
    mean = Program(windows=UNEVEN, loss="terms", given="mean", counts=True)
    yield from (mean, replace(mean, way="announce", loop="last"))
    yield replace(mean, model="heads", way="announce", loop="last")
    for way in ("backward", "run", "more"):
        for loop in ("last", "flush"):
            yield Program(model="attention", windows=UNEVEN, way=way, loop=loop)
    for way in ("over", "backward", "run"):
        for loader in ("samples", "batches", *["reused"] * (way != "over")):
            yield Program(windows=UNEVEN, way=way, loader=loader, epochs=2)
        yield Program(model="attention", windows=(UNEVEN[0], UNEVEN[1][:2]), way=way, epochs=2)
    events = ("rate", "freeze", "thaw", "evaluate", "load", "raise", "resume", "nan")
    for event, way in in_turns(events):
        loop = "last" if event == "raise" and way != "step" else "over"
        yield Program(windows=UNEVEN, way=way, event=event, at=1, loop=loop)
    yield Program(windows=(UNEVEN[0], UNEVEN[1]), way="backward", loop="steps")
    yield Program(model="frozen", windows=UNEVEN, way="backward", event="group", at=1)
    yield Program(windows=UNEVEN, way="run", event="discard", at=1, loop="last")
    yield Program(windows=UNEVEN, event="oom", at=1)
    for event, model in (("swap", "mlp"), ("gain", "gained"), ("patch", "patched")):
        yield Program(model, UNEVEN, way="run", event=event, at=1, execute="traced")
    for way in ("backward", "run"):
        yield Program(windows=UNEVEN, way=way, event="left", at=1)
    yield Program(windows=UNEVEN, optimizer="groups", clip="groups")
    yield Program(windows=UNEVEN, way="backward", joint=True)
    yield Program(model="attention", windows=UNEVEN, way="backward", joint=True, loader="samples")
    values: dict[str, Iterable[Any]] = {
        "call": CALLS,
        "batch": ("dict", "tuple", "dataclass", "namedtuple", "nested", "list"),
        "style": STYLES,
        "names": NAMES,
        "optimizer": OPTIMIZERS,
        "scheduler": SCHEDULERS,
        "clip": ("norm", "loose", "value"),
        "close": [(name,) for name in CLOSE],
        "loss": ("ce", "smooth", "classes", "mse", "weighted"),
        "criterion": (True,),
        "numbers": (True,),
        "precision": ("float32", "bf16", "fp16"),
    }
    ways = itertools.cycle(("step", "backward", "run"))
    for field, some in values.items():
        for value in some:
            optimizer = "momentum" if value == "momentum cycle" else "sgd"
            plain = Program(windows=UNEVEN, way=next(ways), optimizer=optimizer)
            yield replace(plain, **{field: value})


def planted(name: str, way: str, given: str) -> Program:
    """Return a program with a mistake, and with enough samples to see it."""
    plan = MISTAKES[name]
    whole = way in WHOLE_BATCH
    models = [model for model in models_of(plan) if model not in TOKEN_MODELS] or plan.models
    return Program(
        model=models[len(name + way) % len(models)],
        windows=((Micro(5), Micro(5 if whole else 2), Micro(2 if whole else 3)),)
        * max(2, plan.windows),
        loss=plan.losses[0],
        given=given,
        way=way,
        counts=plan.counts,
        mistake=name,
    )


def ways_of_mistakes() -> Iterator[tuple[str, str]]:
    """Yield each mistake with one way of each entry point, in turns; `make programs` draws all."""
    for turn, (name, plan) in enumerate(MISTAKES.items()):
        for ways in (("step", "gradient"), ("backward", "run")):
            some = [way for way in ways if way in plan.ways]
            if some:
                yield name, some[turn % len(some)]


@pytest.mark.parametrize("name, way", [*ways_of_mistakes()])
def test_no_mistake_passes_unseen(machine: Worker, name: str, way: str) -> None:
    """It is named in time, or the update is exact."""
    kinds = MISTAKES[name].given
    verdict = machine.judge(planted(name, way, kinds[len(name + way) % len(kinds)]))
    assert not verdict.failed, verdict


@pytest.mark.parametrize("name", [n for n, plan in MISTAKES.items() if plan.ways == TESTED])
def test_verify_finds_what_a_loop_of_your_own_may_not(machine: Worker, name: str) -> None:
    text = script(planted(name, "step", MISTAKES[name].given[0])).split("train = wb.WholeBatch")[0]
    verified = "wb.verify(model, loss, batches[0], micro_batch=5).same"
    outcome = machine.run(f"{text}\nprint(json.dumps([{{'same': {verified}}}]))")
    assert outcome.windows == [{"same": False}], outcome


def in_turns(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each name with one way in, in turns; `make programs` draws all."""
    yield from zip(names, itertools.cycle(("step", "backward", "run")), strict=False)


ROWS_APART = [name for name in MODELS if name not in STRUCTURED]


@pytest.mark.parametrize("model, way", [*in_turns(ROWS_APART)])
def test_every_model_is_right(machine: Worker, model: str, way: str) -> None:
    verdict = machine.judge(Program(model=model, windows=UNEVEN, way=way))
    told_of = "random numbers" if model == "random" else "BatchNorm"
    assert verdict.kind == "exact" or told_of in verdict.detail, verdict


@pytest.mark.parametrize("model", STRUCTURED)
def test_one_example_per_micro_batch_is_right_and_warned_of(machine: Worker, model: str) -> None:
    verdict = machine.judge(Program(model=model, windows=UNEVEN, way="backward"))
    assert verdict.kind in ("warned", "exact"), verdict


@pytest.mark.parametrize("loss, way", [*in_turns(ROW_LOSSES)])
def test_every_loss_is_right(machine: Worker, loss: str, way: str) -> None:
    model = ("mlp", "attention")[len(loss + way) % 2]
    verdict = machine.judge(Program(model=model, windows=UNEVEN, loss=loss, way=way))
    assert verdict.kind == "exact", verdict


@pytest.mark.parametrize("program", [*covering(), *FOUND], ids=repr)
def test_every_value_is_right_and_what_was_found_stays_found(
    machine: Worker, program: Program
) -> None:
    verdict = machine.judge(program)
    assert not verdict.failed, verdict.detail


def test_what_is_listed_is_on_the_page() -> None:
    page = " ".join((ROOT / "docs/laws.md").read_text(encoding="utf-8").split())
    listed = [words for mistake in MISTAKES.values() for words in mistake.listed.values()]
    for words in (ONE_ROW, SIZE, LATER, *listed):
        assert " ".join(words.split()) in page
