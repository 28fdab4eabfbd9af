"""`verify_loop`: a watch over full and short windows, with the units of the loss given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import wholebatch as wb
from tests.distributed.launch import reports
from tests.verification import window_loops
from tests.verification.window_loops import mean, mean_of_means, not_divided, right, units
from wholebatch.verification import MISTAKES, ZOO, Case, verify_loop
from wholebatch.verification.example_models import loss


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("sums", "not-divided"),  # the units are given: the loss is a mean
        ("steps_of_four", "no-update"),
    ],
)
@pytest.mark.parametrize("case", ["mlp", "lm"])
def test_mistakes_are_named(name: str, key: str, case: str) -> None:
    verdict = verify_loop(getattr(window_loops, name), case=case)
    assert not verdict.same
    assert verdict.exit_status == 1
    assert key in verdict.mistakes, str(verdict)


def test_a_right_loop_is_right_on_every_model() -> None:
    verdict = verify_loop(right)
    assert verdict.same, str(verdict)
    assert verdict.exit_status == 0
    assert [trial.case for trial in verdict.trials] == ["mlp"] * 4 + ["lm"] * 4


def test_equal_micro_batches_can_be_promised() -> None:
    assert not verify_loop(mean_of_means, case="mlp").same
    assert verify_loop(mean_of_means, case="mlp", uneven=False).same


def test_a_clip_before_the_last_micro_batch_is_wrong_even_if_it_cuts_nothing() -> None:
    def loop(model: Any, optimizer: Any, micros: Any) -> None:
        for place, micro in enumerate(micros):
            if place + 1 == len(micros):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e3)
            (mean(model, micro) * units([micro]) / units(micros)).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert verify_loop(loop, case="mlp").mistakes == ("clipped-too-early",)


def test_an_update_by_hand_is_not_judged() -> None:
    def loop(model: Any, optimizer: Any, micros: Any) -> None:
        for micro in micros:
            (mean(model, micro) / len(micros)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        optimizer.zero_grad()

    assert verify_loop(loop, case="mlp").exit_status == 3


def test_built_in_models_on_which_a_loop_fails_are_left_out() -> None:
    def loop(model: Any, optimizer: Any, micros: Any) -> None:
        if micros[0]["x"].is_floating_point():
            raise ValueError("a language model is needed")
        right(model, optimizer, micros)

    verdict = verify_loop(loop)
    assert verdict.same
    assert {trial.case for trial in verdict.trials} == {"lm"}
    assert "not run on the built-in model 'mlp', where the loop raises ValueError" in str(verdict)
    with pytest.raises(ValueError, match="a language model is needed"):
        verify_loop(loop, case="mlp")


def test_batchnorm_is_a_coupling_and_no_mistake_of_the_loop() -> None:
    def model() -> torch.nn.Module:
        nn = torch.nn
        return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Linear(16, 5))

    case = Case("batchnorm", model, loss, ZOO["mlp"].window)
    assert verify_loop(right, case=case, uneven=False).mistakes == ("coupled",)


def test_the_zoo_is_uneven_enough() -> None:
    """A mean of means must be far from the mean, or the mistake could not be told."""
    for case in ZOO.values():
        model = case.model()
        counts = [case.loss(model, micro).units for micro in case.window(4, False, 0)]
        assert max(map(float, counts)) >= 4 * min(map(float, counts)), case.name
        even = [float(case.loss(model, micro).units) for micro in case.window(4, True, 0)]
        assert len(set(even)) == 1, case.name


def test_usage() -> None:
    with pytest.raises(wb.errors.OptionError, match="must be one of mlp, lm"):
        verify_loop(not_divided, case="transformer")
    with pytest.raises(wb.errors.OptionError, match="at least 2"):
        verify_loop(not_divided, steps=1)
    with pytest.raises(wb.errors.OptionError, match="must be a function"):
        verify_loop("train.py")  # type: ignore[arg-type]


def test_json_and_text() -> None:
    verdict = verify_loop(not_divided, case="mlp")
    data = json.loads(verdict.to_json())
    assert data["same"] is False
    assert data["mistakes"] == ["not-divided"]
    assert data["trials"][0]["findings"][0]["key"] == "not-divided"
    assert MISTAKES["not-divided"].instead in str(verdict)


@pytest.mark.slow
@pytest.mark.distributed
def test_on_two_ranks(tmp_path: Path) -> None:
    found = reports(Path(__file__).with_name("ranks_worker.py"), 2, tmp_path)
    for name, engine in found["engines"].items():
        assert engine["same"], (name, engine)
        assert engine["ranks"] == 2
        assert engine["untouched"], name
    assert found["engines"]["ddp-batchnorm"]["undivided"]
