"""What a type checker says of a loop: batches keep their type, a loss needs units."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import wholebatch as wb
from tests.support import mlp, sgd

ROOT = Path(__file__).parents[2]

LOOP = """\
import torch
import wholebatch as wb
from typing_extensions import assert_type
from wholebatch.integrations.lightning import FabricAccumulator

Pair = tuple[torch.Tensor, str]

def train(model: torch.nn.Module, loader: list[Pair]) -> None:
    acc = wb.Accumulator(model, torch.optim.SGD(model.parameters()), steps=4)
    for micro in acc.over(loader):
        assert_type(micro, Pair)
        loss = torch.as_tensor(model(micro[0]))
        acc.backward(loss)  # error
        acc.backward(mean=loss)  # error
        acc.backward(loss, mean=loss, units=3)  # error
        acc.backward()  # error
        acc.backward(loss, units=3)
        acc.backward(loss, 3, last=True)
        acc.backward(mean=loss, units=loss)
        assert_type(acc.backward(wb.Loss(loss, 3), more=True), wb.Step | None)
    for micro in wb.over(loader, acc):
        assert_type(micro, Pair)
    whole = wb.WholeBatch(model, torch.optim.SGD(model.parameters()), loss=wb.causal_lm)
    for batch in whole.over(loader):
        assert_type(batch, Pair)

def with_fabric(windows: FabricAccumulator, loss: torch.Tensor) -> None:
    windows.backward(loss, last=True)  # error
    windows.backward(mean=loss, units=3, last=True)
"""


@pytest.mark.slow
def test_mypy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api = pytest.importorskip("mypy.api")
    monkeypatch.chdir(ROOT)  # whose cache it uses
    (tmp_path / "loop.py").write_text(LOOP)
    printed, problems, _ = api.run(["--strict", str(tmp_path / "loop.py")])
    assert not problems
    said = {int(number): code for number, code in re.findall(r":(\d+): error: .*\[(.*)\]", printed)}
    lines = enumerate(LOOP.splitlines(), 1)
    wanted = {number: "call-overload" for number, line in lines if line.endswith("# error")}
    assert said == wanted, printed


@pytest.mark.parametrize("micro_batches", [0, 1, 3, 4, 5, 10])
@pytest.mark.parametrize("steps", [1, 4, {0: 4, 1: 2, 2: 3}, lambda update: 1 + update])
def test_updates_per_epoch_are_those_of_the_loop(micro_batches: int, steps: object) -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=steps)  # type: ignore[arg-type]
    loader = [torch.randn(2, 5, dtype=torch.float64) for _ in range(micro_batches)]
    for _ in range(2):  # the second epoch's windows follow the schedule from where it is
        before, wanted = acc.updates, acc.updates_per_epoch(loader)
        for micro in acc.over(loader):
            acc.backward(model(micro).square().sum(), units=len(micro))
        assert acc.updates - before == wanted


def test_a_loader_without_a_length_has_no_updates_per_epoch() -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=4)
    with pytest.raises(wb.errors.OptionError, match=r"has no len.*step\.update"):
        acc.updates_per_epoch(iter(range(3)))  # type: ignore[arg-type]
