"""The machine itself: its scripts run alone, its oracle is no part of wholebatch, and it finds."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.programs.description import Micro, Program
from tests.programs.found import FOUND
from tests.programs.judge import judge, verdict
from tests.programs.mistakes import MISTAKES
from tests.programs.run import Outcome, run
from tests.programs.script import script

ROOT = Path(__file__).parents[2]
SMALL = Program(windows=((Micro(3), Micro(2, "one")), (Micro(3),)), loss="mse")


def test_a_script_runs_alone(tmp_path: Path) -> None:
    """`python program.py` prints what the fork returns."""
    path = tmp_path / "program.py"
    path.write_text(script(SMALL), encoding="utf-8")
    ended = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout) == run(script(SMALL)).windows


def test_the_oracle_imports_nothing_of_ours() -> None:
    for name in ("oracle", "models", "description"):
        text = (ROOT / "tests/programs" / f"{name}.py").read_text(encoding="utf-8")
        assert "import wholebatch" not in text
        assert "from wholebatch" not in text


@pytest.mark.parametrize("name", ["loss", "units", "norm", "update"])
def test_a_wrong_number_is_found(name: str) -> None:
    outcome = run(script(SMALL))
    assert verdict(SMALL, outcome).kind == "exact"
    wrong = [*outcome.windows]
    wrong[1] = {**wrong[1], name: wrong[1][name] * 1.001}
    found = verdict(SMALL, Outcome(wrong))
    assert found.failed
    assert found.signature == f"silent: {name}"


def test_a_wrong_update_is_found() -> None:
    outcome = run(script(SMALL))
    wrong = [*outcome.windows]
    parameters = [wrong[0]["parameters"][0] + 1e-9, *wrong[0]["parameters"][1:]]
    wrong[0] = {**wrong[0], "parameters": parameters}
    assert verdict(SMALL, Outcome(wrong)).signature == "silent: parameters"


def test_a_mistake_that_nobody_names_is_found() -> None:
    planted = replace(SMALL, mistake="mean as total")
    outcome = run(script(planted))
    assert outcome.refused
    assert not verdict(planted, outcome).failed
    unseen = run(script(planted).replace("micro_batch=", "audit=False, micro_batch="))
    assert verdict(planted, unseen).signature == "silent: mean as total in step"


@pytest.mark.parametrize("program", FOUND, ids=repr)
def test_what_was_found_stays_found(program: Program) -> None:
    found = judge(program)
    assert not found.failed, found.detail


def test_what_is_listed_is_on_the_page() -> None:
    page = " ".join((ROOT / "docs/laws.md").read_text(encoding="utf-8").split())
    for mistake in MISTAKES.values():
        for words in mistake.listed.values():
            assert " ".join(words.split()) in page
