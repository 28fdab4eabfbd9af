"""The examples run, and show what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import EXACT

FOLDER = Path(__file__).parents[1] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_resnet_batchnorm(capsys: pytest.CaptureFixture[str]) -> None:
    rows = example("resnet_batchnorm").main(updates=1)
    weights, statistics, peak = rows["wholebatch"]
    assert weights <= EXACT
    assert statistics <= EXACT
    assert peak <= 1.1 * rows["undivided"][2]
    weights, statistics, peak = rows["plain accumulation"]
    assert weights > 0.1
    assert statistics > 0.1
    assert peak < 0.5 * rows["undivided"][2]
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_clip_contrastive(capsys: pytest.CaptureFixture[str]) -> None:
    rows = example("clip_contrastive").main(updates=2)
    assert rows["wb.Coupled"][0] <= EXACT
    assert rows["plain accumulation"][0] > 0.1
    assert rows["wb.Coupled"][1] < 0.8 * rows["undivided"][1]
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize("name", ["moe_load_balance", "normalised_advantage"])
def test_other_losses_of_the_whole_batch(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    errors = example(name).main()
    assert errors["wb.Coupled"] <= EXACT
    assert errors["plain accumulation"] > 1e-3
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.slow
def test_diffusion(capsys: pytest.CaptureFixture[str]) -> None:
    found = example("diffusion").main()
    assert max(found[f"split by {size}"] for size in (1, 8, 17)) <= EXACT
    assert found["verified"]
    assert found["loss of the EMA"] < 0.5 * found["first loss"]
    assert len(capsys.readouterr().out.splitlines()) == 6
