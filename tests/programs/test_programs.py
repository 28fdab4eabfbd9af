"""The machine itself: its scripts run alone, its oracle is no part of wholebatch, and it finds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.processes import worker
from tests.programs.description import TOKEN_MODELS, WHOLE_BATCH, Micro, Program
from tests.programs.found import FOUND
from tests.programs.grammar import models_of, programs
from tests.programs.hosts import HOSTS
from tests.programs.judge import Verdict, judge, verdict
from tests.programs.mistakes import MISTAKES, TESTED
from tests.programs.models import MODELS, ROW_LOSSES
from tests.programs.run import Outcome, run
from tests.programs.script import script

ROOT = Path(__file__).parents[2]
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
        yield Worker(pool)


def test_a_script_runs_alone(machine: Worker, tmp_path: Path) -> None:
    """`python program.py` prints what the fork returns."""
    path = tmp_path / "program.py"
    path.write_text(script(SMALL), encoding="utf-8")
    ended = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
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
    found = machine.verdict(SMALL, Outcome(wrong))
    assert found.failed
    assert found.signature == f"silent: {name}"


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


@pytest.mark.parametrize("number", range(2))
def test_a_slice_of_programs(machine: Worker, number: int) -> None:
    """A fixed slice; `make programs` draws further ones."""
    failures = []

    @settings(
        max_examples=12,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @seed(number)
    @given(programs())
    def judged(program: Program) -> None:
        if program.way in HOSTS or program.execute == "compile":
            return  # seconds each; the tests of their packages run them
        found = machine.judge(program)
        if found.failed:
            failures.append((program, found.signature, found.detail))

    judged()
    assert not failures


def planted(name: str, way: str, given: str) -> Program:
    """Return a program with a mistake, and with enough samples to see it."""
    plan = MISTAKES[name]
    whole = way in WHOLE_BATCH
    models = [model for model in models_of(plan) if model not in TOKEN_MODELS] or plan.models
    return Program(
        model=models[len(name + way) % len(models)],
        windows=((Micro(5), Micro(5 if whole else 2), Micro(2 if whole else 3)),) * 2,
        loss=plan.losses[0],
        given=given,
        way=way,
        counts=plan.counts,
        mistake=name,
    )


WAYS = ("step", "gradient", "backward", "run")


@pytest.mark.parametrize(
    "name, way",
    [(name, way) for name, plan in MISTAKES.items() for way in WAYS if way in plan.ways],
)
def test_no_mistake_passes_unseen(machine: Worker, name: str, way: str) -> None:
    """It is named in time, or the update is exact."""
    for given_as in MISTAKES[name].given:
        found = machine.judge(planted(name, way, given_as))
        assert not found.failed, found


@pytest.mark.parametrize(
    "name, way, given",
    [
        ("contrastive", "accelerate", "total"),
        ("running mean", "accelerate", "mean"),
        ("zero_grad", "accelerate", "total"),
        ("mean as total", "fabric", "total"),
        ("optimizer step", "fabric", "mean"),
        ("contrastive", "lightning", "mean"),
        ("softmax over samples", "lightning", "mean"),
        ("clipping", "lightning", "mean"),
        ("growing weight", "trainer", "mean"),
        ("divided by steps", "trainer", "mean"),
        ("zero_grad", "trainer", "mean"),
    ],
)
def test_no_mistake_passes_a_library_unseen(
    machine: Worker, name: str, way: str, given: str
) -> None:
    found = machine.judge(planted(name, way, given))
    assert not found.failed, found


@pytest.mark.parametrize("name", [n for n, plan in MISTAKES.items() if plan.ways == TESTED])
def test_verify_finds_what_a_loop_of_your_own_may_not(machine: Worker, name: str) -> None:
    text = script(planted(name, "step", MISTAKES[name].given[0])).split("train = wb.WholeBatch")[0]
    verified = "wb.verify(model, loss, batches[0], micro_batch=5).same"
    outcome = machine.run(f"{text}\nprint(json.dumps([{{'same': {verified}}}]))")
    assert outcome.windows == [{"same": False}], outcome


UNEVEN = ((Micro(3), Micro(3), Micro(2, "one")), (Micro(3), Micro(3, "none"), Micro(1)))


@pytest.mark.parametrize("way", ["step", "backward", "run"])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_right(machine: Worker, model: str, way: str) -> None:
    found = machine.judge(Program(model=model, windows=UNEVEN, way=way))
    assert found.kind == "exact" or "BatchNorm" in found.detail, found


@pytest.mark.parametrize("way", ["step", "backward", "run"])
@pytest.mark.parametrize("loss", ROW_LOSSES)
def test_every_loss_is_right(machine: Worker, loss: str, way: str) -> None:
    for model in ("mlp", "attention"):
        found = machine.judge(Program(model=model, windows=UNEVEN, loss=loss, way=way))
        assert found.kind == "exact", found


@pytest.mark.parametrize("program", FOUND, ids=repr)
def test_what_was_found_stays_found(machine: Worker, program: Program) -> None:
    found = machine.judge(program)
    assert not found.failed, found.detail


def test_what_is_listed_is_on_the_page() -> None:
    page = " ".join((ROOT / "docs/laws.md").read_text(encoding="utf-8").split())
    for mistake in MISTAKES.values():
        for words in mistake.listed.values():
            assert " ".join(words.split()) in page
