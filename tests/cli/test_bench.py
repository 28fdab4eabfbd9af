"""`wholebatch bench`: every loop runs, and the table tells the right ones from the wrong ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import wholebatch as wb
from tests.cli.helpers import EXACT, NOISY, Ran
from wholebatch.cli.recipe_measuring import write_result
from wholebatch.errors import OptionError
from wholebatch.tune.loop_comparison import LoopComparison, LoopRow, bench
from wholebatch.tune.training_loops import LOOPS, Job

INSTALLED = ("Accelerate", "Fabric", "Lightning", "Transformers")


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.optim.AdamW(model.parameters())


def loss(model: Any, micro: Any) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def unequal_labels() -> dict[str, torch.Tensor]:
    """23 samples, and the further on, the fewer of them count."""
    place = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 3, (23,), generator=place)
    labels[torch.rand(23, generator=place) < torch.linspace(0, 0.9, 23)] = -100
    return {"x": torch.randn(23, 6, generator=place, dtype=torch.float64), "y": labels}


def equal_labels() -> dict[str, torch.Tensor]:
    place = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(24, 6, generator=place, dtype=torch.float64),
        "y": torch.arange(24) % 3,
    }


def measured(batches: Callable[[], Any], names: list[str], **options: Any) -> dict[str, LoopRow]:
    job = Job(make, loss, batches, 6, torch.device("cpu"), **options)
    return {row.name: row for row in bench(job, names, seconds=1e-3, least=1).rows}


def test_a_loss_that_is_not_finite_is_not_measured() -> None:
    with pytest.raises(wb.errors.NonFiniteError, match="the loss of the first batch is nan"):
        measured(lambda: {**equal_labels(), "x": torch.full((24, 6), torch.nan).double()}, ["loop"])
    assert LoopRow("ours", (0.1,), off=float("nan")).is_wrong


def test_whose_gradient_is_that_of_the_batch() -> None:
    clip_norm = 0.1
    names = ["wholebatch eager", "loop", "whole batch", *INSTALLED]
    unequal = measured(unequal_labels, names, clip_norm=clip_norm)
    equal = measured(equal_labels, names, clip_norm=clip_norm)
    for name in names:
        row = equal[name]
        assert not row.why, (name, row.why)
        assert row.window, name
        assert row.off is not None, name
        assert row.off < 1e-12, name  # where all parts are alike, every loop is right
    for name in ("wholebatch eager", "whole batch"):
        off = unequal[name].off
        assert off is not None, name
        assert off < 1e-12, name
    for name in ("loop", *INSTALLED):
        off = unequal[name].off
        assert off is not None, name
        assert off > 0.05, name
    whole, ours = unequal["whole batch"].peak, unequal["wholebatch eager"].peak
    assert whole is not None
    assert ours is not None
    assert 0 < ours < whole


def test_random_models_and_failures_are_told() -> None:
    def dropped() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        return model, torch.optim.SGD(model.parameters())

    job = Job(dropped, loss, equal_labels, 6, torch.device("cpu"))
    found = bench(job, ["wholebatch eager", "loop"], seconds=1e-3, least=1)
    assert [row.off for row in found.rows] == [None, None]
    assert "random numbers" in " ".join(found.notes)

    def small_only(model: Any, micro: Any) -> wb.Loss:
        if len(micro["y"]) > 6 and calls:
            raise ValueError("too many samples")
        return loss(model, micro)

    calls: list[int] = []
    job = Job(make, small_only, equal_labels, 6, torch.device("cpu"))
    found = bench(
        job,
        ["loop", "whole batch"],
        seconds=1e-3,
        least=1,
        begin=lambda _: calls.append(1) if _ == "loop" else None,
    )
    loop, whole = found.rows
    assert loop.window
    assert whole.why == "failed: ValueError: too many samples"
    assert whole.why in " ".join(found.notes)
    assert json.dumps(found.to_dict())


def test_a_machine_that_changes_is_told() -> None:
    rows = (LoopRow("a", (1.0, 1.0, 9.0)), LoopRow("b", (2.0,)))
    assert rows[0].window == 1.0  # what else the machine did once does not count
    assert LoopComparison(rows, 4, 8, again=1.04).notes == []
    assert "20% slower at the end" in LoopComparison(rows, 4, 8, again=1.2).notes[0]


def test_the_command(command: Callable[..., Ran], recipe: Callable[..., Path]) -> None:
    path = recipe(EXACT)
    ran = command(
        "bench", path, "--beside", "wholebatch,loop", "--seconds", 0.01, "--out", "out/b.json"
    )
    assert ran.status == 0, ran.err
    assert "mine: batch of 10 in 3 × 4, full" in ran.out
    data = json.loads(Path("out/b.json").read_text(encoding="utf-8"))
    ours, loop = data["rows"]
    assert ours["gradient_off_by"] < 1e-12
    assert loop["gradient_off_by"] > 0.01  # 4, 4 and 2 samples: a mean of means
    assert re.search(r"× (faster|slower), gradient \d+% wrong|same speed, gradient", ran.out)
    assert (ours["is_wrong"], loop["is_wrong"]) == (False, True)
    page = Path("out/b.html").read_text(encoding="utf-8")
    assert "gradient off by" in page
    assert " KiB" in page
    assert '<tr class="wrong"><th scope="row">loop' in page

    short = ("--beside", "wholebatch", "--seconds", 0.01, "--out", "out/b.json", "--json")
    printed = command("bench", path, *short).out
    assert json.loads(printed) == json.loads(Path("out/b.json").read_text(encoding="utf-8"))

    for given, said in [
        (("--beside", "loops"), "--beside loops: must be one of wholebatch"),
        (("--micro-batch", "0"), "--micro-batch 0: must be a whole number, at least 1"),
        (("--micro-batch", "11"), "--micro-batch 11: is more than the batch of 10"),
        (("--precision", "half"), "must be full, bf16, fp16 or fp8"),
        (("--out", "bench.txt"), "must be the name of a .json file"),
        (("--clock", "sun"), "must be one of wall, cpu"),
        (("--seconds", "0"), "must be above 0"),
        (("--batch-size", "99"), "is more than the 24 samples"),
    ]:
        ran = command("bench", path, *given)
        assert ran.status == 2
        assert said in ran.err
    tokens = recipe(NOISY, ('"micro_batch": 4', '"micro_batch": "40 tokens"'), name="tokens.py")
    assert "give --micro-batch N" in command("bench", tokens).err


def test_unknown_ways() -> None:
    job = Job(make, loss, equal_labels, 6, torch.device("cpu"))
    with pytest.raises(OptionError, match="Lightnings: is no way"):
        bench(job, ["Lightnings"])
    with pytest.raises(OptionError, match="no way is named"):
        bench(job, [])
    assert set(INSTALLED) <= set(LOOPS)


def test_a_disk_that_is_full_at_the_end_loses_nothing(tmp_path: Path) -> None:
    """What was measured is shown all the same."""
    shown: list[str] = []

    class Found:
        def write(self, path: Path) -> None:
            raise wb.errors.OptionError(f"{path}: cannot be written: No space left on device")

    with pytest.raises(wb.errors.OptionError, match="No space left"):
        write_result(
            Found(), tmp_path / "a.json", Console(), lambda: shown.append("all"), as_json=False
        )
    assert shown == ["all"]
