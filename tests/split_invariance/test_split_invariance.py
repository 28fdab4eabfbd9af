"""What is compared, by which tolerance, and what a function must return."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests import processes
from wholebatch.cli import main
from wholebatch.errors import OptionError
from wholebatch.split_invariance import split_invariance
from wholebatch.testing import assert_split_invariant

pytest_plugins = ["wholebatch.pytest_plugin"]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator)


def trained(model: nn.Module, micro_batch: int, autocast: bool = False) -> nn.Module:
    x, y = (each.to(torch.get_default_dtype()) for each in data())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in zip(x.split(micro_batch), y.split(micro_batch), strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(inputs)
        (functional.mse_loss(output.to(y.dtype), targets, reduction="sum") / 8).backward()
    optimizer.step()
    return model


def layers(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 16), *more, nn.Tanh(), nn.Linear(16, 1))


def test_the_fixture(split_invariant: Any) -> None:
    report = split_invariant(lambda size: trained(layers(), size), (8, 3))
    assert report.compared == "compared: gradients before clipping, and the parameters' movement"


def test_rounding_that_is_more_than_that_of_the_parameters_needs_a_tolerance() -> None:
    def train(micro_batch: int) -> nn.Module:
        return trained(layers(), micro_batch, autocast=True)

    with pytest.raises(AssertionError, match="or rounding, of autocast for example"):
        assert_split_invariant(train)
    assert_split_invariant(train, tolerance=0.02)


def test_dropout_and_batch_statistics() -> None:
    twice = (nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5))  # one alone draws row by row
    with pytest.raises(AssertionError, match="not known; most is off in"):
        assert_split_invariant(lambda size: trained(layers(*twice), size))
    with pytest.raises(AssertionError, match=r"by wb\.watch, Wrong: coupled samples"):
        assert_split_invariant(lambda size: trained(layers(nn.BatchNorm1d(16)), size), (8, 4))


def test_a_run_that_is_never_the_same_is_not_judged() -> None:
    generator = torch.Generator().manual_seed(0)

    def train(micro_batch: int) -> dict[str, torch.Tensor]:
        return {"gradient": torch.randn(3, generator=generator)}

    with pytest.raises(AssertionError, match=r"run twice differs by .* from fixed seeds"):
        assert_split_invariant(train)


@pytest.mark.parametrize("kind", ["arrays", "tensors", "list"])
def test_what_is_returned_is_compared(kind: str) -> None:
    def train(micro_batch: int, factor: float = 1.0) -> Any:
        x = data()[0].double().numpy()
        total: Any = sum(part.sum(0) for part in np.split(x, 8 // micro_batch))
        total = total if factor == 1.0 else total * 8 / micro_batch
        named = {"arrays": {"w": total}, "tensors": {"w": torch.tensor(total)}, "list": [total]}
        return named[kind]

    report = assert_split_invariant(train, tolerance=1e-12)
    assert report.compared == "compared: what train() returned"
    with pytest.raises(AssertionError, match="multiplied by K, the number"):
        assert_split_invariant(lambda size: train(size, 2.0))


def test_movement_alone_hides_factors_and_it_is_said() -> None:
    """A step by hand shows no gradient; the model's movement is compared."""

    def train(micro_batch: int, wrong: bool = False) -> nn.Module:
        model = layers()
        for inputs in data()[0].split(micro_batch):
            (model(inputs).sum() / 8 * (1 + wrong * (micro_batch == 1))).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        return model

    assert "clipping or Adam hide a factor" in assert_split_invariant(train).compared
    with pytest.raises(AssertionError, match="multiplied by one number"):
        assert_split_invariant(lambda size: train(size, True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batches": ()}, "must be positive numbers"),
        ({"micro_batches": (8, 0)}, "must be positive numbers"),
        ({"micro_batches": (8,)}, "give two splits"),
        ({"ranks": (1, 2)}, "at the top level of a module"),
    ],
)
def test_refused(options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        split_invariance(lambda size: trained(layers(), size), **options)


def test_nothing_returned_is_refused() -> None:
    with pytest.raises(OptionError, match="returned NoneType: it must return the trained model"):
        assert_split_invariant(lambda size: None)


def test_the_report_is_json() -> None:
    report = split_invariance(lambda size: trained(layers(), size), micro_batches=(8, 4))
    assert json.loads(report.to_json())["splits"][0]["micro_batch"] == 4


def test_the_plugin_imports_no_torch() -> None:
    code = "import sys, wholebatch.pytest_plugin; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": processes.PATH}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


FILE = """
import torch

def train(micro_batch):
    torch.manual_seed(0)
    model, data = torch.nn.Linear(3, 1), torch.randn(8, 3)
    for micro in data.split(micro_batch):
        (model(micro).square().sum() / DIVISOR).backward()
    return {name: p.grad for name, p in model.named_parameters()}
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trainer.py"
    file.write_text(FILE.replace("DIVISOR", "8"), encoding="utf-8")
    command = ["verify", f"{file}:train", "--splits"]
    assert main([*command, "8,4,1"]) == 0
    assert "Same update (compared: what train() returned" in capsys.readouterr().out
    wrong = tmp_path / "wrong.py"
    wrong.write_text(FILE.replace("DIVISOR", "micro_batch"), encoding="utf-8")
    assert main(["verify", f"{wrong}:train", "--splits", "8,4", "--json"]) == 1
    [cause] = json.loads(capsys.readouterr().out)["causes"]
    assert "multiplied by K, the number of micro-batches" in cause
    for arguments, said in [
        ([*command, "8,x"], "--splits 8,x: must be positive numbers, such as 8,4,1"),
        (["verify", f"{file}:train", "--ranks", "2"], "--ranks: belongs to --splits"),
        (["verify", f"{file}:other", "--splits", "8,4"], "has no function other(micro_batch)"),
    ]:
        assert main(arguments) == 2
        assert said in capsys.readouterr().err.replace("\n", " ")
