"""`wholebatch verify`: its exit status, its JSON, and what it says on the screen."""

from __future__ import annotations

import json
import os
import re
import textwrap
from pathlib import Path

import pytest

from tests import processes
from wholebatch.cli import main

RECIPE = """
    import torch
    import wholebatch as wb

    defaults = {"batch_size": 20, "micro_batch": 6}

    def model():
        return torch.nn.Sequential(torch.nn.Linear(4, 8), LAYER, torch.nn.Linear(8, 3))

    def data():
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(40, 4, generator=generator), torch.arange(40) % 3
        return torch.utils.data.TensorDataset(x, y)

    def loss(model, micro):
        return wb.cross_entropy(model(micro[0]), micro[1])
"""

LOOP = """
    from torch.nn import functional as F

    def right(model, optimizer, micro_batches):
        units = sum(int((micro["y"] != -100).sum()) for micro in micro_batches)
        for micro in micro_batches:
            logits = model(micro["x"]).flatten(0, -2)
            loss = F.cross_entropy(logits, micro["y"].flatten(), reduction="sum")
            (loss / units).backward()
        optimizer.step()
        optimizer.zero_grad()

    def wrong(model, optimizer, micro_batches):
        for micro in micro_batches:
            logits = model(micro["x"]).flatten(0, -2)
            F.cross_entropy(logits, micro["y"].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def broken(model, optimizer, micro_batches):
        micro_batches[0]["pixels"]
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(RECIPE).replace("LAYER", "torch.nn.Tanh()"), encoding="utf-8")
    return path


@pytest.fixture
def loop(tmp_path: Path) -> Path:
    path = tmp_path / "loop.py"
    path.write_text(textwrap.dedent(LOOP), encoding="utf-8")
    return path


def test_a_recipe_that_is_right(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(recipe)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("same update: ")
    assert "20 samples in 4 micro-batches" in said
    assert "gradient in float64" in said


def test_a_recipe_that_is_not(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = recipe.read_text(encoding="utf-8").replace("torch.nn.Tanh()", "torch.nn.BatchNorm1d(8)")
    recipe.write_text(text, encoding="utf-8")
    options = ["--batchnorm", "allow"]
    assert main(["verify", str(recipe), *options]) == 1
    said = capsys.readouterr().out
    assert said.startswith("DIFFERENT update: ")
    assert "BatchNorm in 1" in said
    assert "0.weight" in said
    assert main(["verify", str(recipe)]) == 0


def test_loops(loop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{loop}:right"]) == 0
    assert "loop.py:right" in capsys.readouterr().out
    assert main(["verify", f"{loop}:wrong"]) == 1
    said = capsys.readouterr().out
    assert "not divided" in said
    assert "mean losses added" in said
    assert "instead: divide the sum by all units of the window, once" in said
    assert main(["verify", f"{loop}:wrong", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["mistakes"] == ["not-divided"]


def test_a_loop_with_a_model_of_its_own(
    loop: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = textwrap.dedent(
        """
        steps = 3
        micro_batch = 5

        def data():
            generator = torch.Generator().manual_seed(0)
            x, y = torch.randn(40, 4, generator=generator), torch.arange(40) % 3
            return [{"x": x[i], "y": y[i]} for i in range(40)]

        def loss(model, micro):
            return wb.cross_entropy(model(micro["x"]), micro["y"])
        """
    )
    text = recipe.read_text(encoding="utf-8").split("def data")[0] + own
    loop.write_text(text + loop.read_text(encoding="utf-8"), encoding="utf-8")
    assert main(["verify", f"{loop}:right", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [trial["case"] for trial in data["trials"]] == ["loop"] * 4
    assert data["trials"][0]["units"] == [5.0, 5.0, 5.0]
    assert len(set(data["trials"][2]["units"])) == 3
    assert main(["verify", f"{loop}:wrong"]) == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["verify", "nowhere.py"], "there is no such file"),
        (["verify", "nowhere.py:train"], "there is no file nowhere.py"),
        (["verify", "nowhere.py:a b"], "must be FILE.py:FUNCTION"),
        (["verify", "bytes-gpt", "--windows", "3"], "--windows: belongs to a script, SCRIPT.py"),
        (["verify", "LOOP:missing"], "has no function missing(model, optimizer, micro_batches)"),
        (["verify", "--micro-batch", "none"], "--micro-batch none: must be"),
        (["verify", "--batchnorm", "some"], "--batchnorm some: must be one of exact, freeze"),
        (["verify", "RECIPE", "--batch-size", "99"], "--batch-size 99: is more than the 40"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    arguments: list[str],
    message: str,
    loop: Path,
    recipe: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for word, path in (("LOOP", loop), ("RECIPE", recipe)):
        arguments = [argument.replace(word, str(path)) for argument in arguments]
    assert main(arguments) == 2
    parts = re.compile(r"\d of \d: ")  # which part of the proof had begun
    (said,) = (line for line in capsys.readouterr().err.splitlines() if not parts.match(line))
    assert message in said


def test_a_file_with_half_of_a_model_is_refused(
    loop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = loop.read_text(encoding="utf-8")
    loop.write_text(text + "\ndef model():\n    return None\n", encoding="utf-8")
    assert main(["verify", f"{loop}:right"]) == 2
    assert "has no function data() (nor loss)" in capsys.readouterr().err


def test_a_loop_that_fails_is_not_judged(loop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{loop}:broken"]) == 3
    said = capsys.readouterr().err
    assert f"error: KeyError: 'pixels', at {loop}:" in said


@pytest.mark.slow
@pytest.mark.distributed
def test_under_torchrun(loop: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    given = ["verify", f"{loop}:right", "--json"]
    done = processes.run(
        "wholebatch.cli", *given, cwd=loop.parent, environment=environment, timeout=240, ranks=2
    )
    assert done.returncode == 1, done.stderr
    data = json.loads(done.stdout)
    assert data["ranks"] == 2
    assert data["mistakes"][0] == "unsynchronised-ranks"
