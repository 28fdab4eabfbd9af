"""`tune` on real models, small: what it measures and recommends; the command."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb
from tests.cli.helpers import EXACT
from tests.support import loss
from wholebatch.errors import NonFiniteError, OptionError, WindowError
from wholebatch.memory.predict import predict_peak
from wholebatch.tune import Task, Trial, range_test, tune

QUICK: dict[str, Any] = {"window_seconds": 0.01}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.mix(self.norm(x)))
        return out


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer(), Layer(), nn.Linear(32, 4))
    return model, torch.optim.AdamW(model.parameters())


def batch(samples: int = 24) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(samples, 32), "y": torch.randint(0, 4, (samples,))}


def task(samples: int = 24, *, loss: Any = loss, **options: Any) -> Task:
    one = batch(samples)
    return Task(build, loss, lambda: one, options)


def test_options_reach_every_window(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    init = wb.WholeBatch.__init__

    def noted(self: Any, *args: Any, **options: Any) -> None:
        given.append(options)
        init(self, *args, **options)

    monkeypatch.setattr(wb.WholeBatch, "__init__", noted)
    one = {**batch(), "w": torch.ones(24)}
    options = {
        "close": wb.Close(clip_value=0.5, sync="hold"),
        "micro_batch": wb.samples(static="w"),
    }
    found = tune(
        Task(build, loss, lambda: one, options), memory="1GiB", micro_batches=[12], **QUICK
    )
    assert found.budget == 2**30
    assert given
    for seen in given:
        assert seen["close"] == wb.Close(clip_value=0.5, nonfinite="skip", sync="hold")
        assert seen["micro_batch"] == wb.samples(12, static="w")


def test_result() -> None:
    seen: list[Trial] = []
    found = tune(
        task(),
        micro_batches=[24, 12, 6],
        checkpointing=(False,),
        unit="rows",
        watch=seen.append,
        **QUICK,
    )
    assert [trial.setting.micro_batch for trial in seen] == [24, 12, 6]  # undivided first
    assert found.best in found.trials
    fastest = max(trial.units_per_second for trial in found.trials)
    assert found.best.units_per_second >= 0.98 * fastest
    assert found.settings["batch_size"] == 24
    assert found.settings["micro_batch"] == found.best.setting.micro_batch
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["kind"] == "wholebatch tune"


def test_memory_decides() -> None:
    model, optimizer = build()
    budget = int(1.1 * predict_peak(model, loss, batch(128), optimizer=optimizer).peak)
    found = tune(task(256), memory=budget, micro_batches=[256, 128, 64], **QUICK)
    largest = next(t for t in found.trials if t.steps == 1 and not t.setting.checkpointing)
    assert not largest.is_measured
    assert largest.why.startswith("needs ")
    assert largest.why.endswith("(predicted)")
    assert found.best.peak is not None
    assert found.best.peak <= budget
    [(why, settings)] = found.left_out.items()
    assert why == "since these sizes fit without checkpointing, which costs time"
    assert 64 in [setting.micro_batch for setting in settings]


def test_advises_not_to_accumulate() -> None:
    """Where a micro-step costs far more than its samples, the undivided batch wins."""

    def slow(model: Any, micro: Any) -> wb.Loss:
        end = torch.zeros(())
        for _ in range(300):  # costs the same whatever the size
            end = end + 0.0
        result = loss(model, micro)
        return wb.Loss(result.total + end, result.units)

    found = tune(task(8, loss=slow), micro_batches=[8, 2, 1], checkpointing=(False,), **QUICK)
    assert found.best.steps == 1
    assert found.advice[0].startswith("do not accumulate: the batch fits undivided")
    assert found.settings["micro_batch"] == 8


def test_a_batch_with_batchnorm_is_tried_undivided_only() -> None:
    def normed() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    one = batch(16)
    found = tune(Task(normed, loss, lambda: one), micro_batches=[4, 8], **QUICK)
    assert [trial.setting.micro_batch for trial in found.trials] == [16]
    assert any("since BatchNorm needs the undivided batch" in line for line in found.advice)


def test_says_how_many_settings_the_time_was_enough_for() -> None:
    given = {"micro_batches": [12, 6, 3], "checkpointing": (False,), **QUICK}
    found = tune(task(), seconds=1e-9, **given)
    assert [trial.is_measured for trial in found.trials] == [True]
    assert found.best.setting.micro_batch == 12  # the largest, not the slowest
    said = "not measured, for lack of time: micro-batch 6, full, eager; micro-batch 3, full"
    assert any(line.startswith(said) for line in found.advice)
    assert "lack of time" not in " ".join(tune(task(), **given).advice)


def test_one_setting_alone_is_no_recommendation() -> None:
    found = tune(task(), micro_batches=[12], checkpointing=(False,), **QUICK)
    assert (found.compares, found.label) == (False, "the only one measured")
    assert found.advice[0].startswith("only micro-batch 12, full, eager was measured: ")
    short = tune(task(), micro_batches=[12, 6, 3], checkpointing=(False,), seconds=1e-9, **QUICK)
    assert short.label == "the only one measured"


def test_out_of_memory_is_a_result() -> None:
    def fails(model: Any, micro: Any) -> wb.Loss:
        if len(micro["x"]) > 6 and not isinstance(micro["x"], torch._subclasses.FakeTensor):
            raise torch.OutOfMemoryError("no more")
        return loss(model, micro)

    given = {"checkpointing": (False,), **QUICK}
    found = tune(task(24, loss=fails), micro_batches=[24, 12, 6, 3], **given)
    why = {trial.setting.micro_batch: trial.why for trial in found.trials}
    assert why[12].startswith("needs more than")
    assert why[24].startswith("needs more than")
    assert found.best.setting.micro_batch <= 6
    with pytest.raises(WindowError, match="no setting could be measured; micro-batch 12, full"):
        tune(task(12, loss=fails), micro_batches=[12], **given)


def test_memory_is_that_of_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data are no part of it: here a megabyte that every sample is a view of."""
    from wholebatch.cli import main

    monkeypatch.chdir(tmp_path)
    text = EXACT.replace("torch.randn(24, 5", "torch.randn(26214, 5")
    text = text.replace("TensorDataset(x, torch.arange(24)", "TensorDataset(x, torch.arange(26214)")
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    options = ["--batch-size", "12", "--micro-batch", "6"]
    assert main(["train", "mine.py", *options, "--out", "run", "--updates", "5"]) == 0
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    trained = json.loads(lines[-1])["memory"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["tune", "mine.py", *options, "--json"]) == 0
    [trial] = json.loads(said.getvalue())["trials"]
    assert trial["peak"] == pytest.approx(trained, rel=0.01)


def test_loss_that_is_not_finite_is_not_measured() -> None:
    one = {**batch(12), "x": torch.full((12, 32), torch.nan)}
    with pytest.raises(NonFiniteError, match=r"loss of a batch is nan: nothing can be measured"):
        tune(Task(build, loss, lambda: one, {"audit": False}), micro_batches=[12])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precisions": ("fp4",)}, "precisions=.*fp4.*must be one or more of full"),
        ({"executes": ()}, "executes=.*must be one or more of eager"),
        ({"micro_batches": [25]}, "must be sizes from 1 to the batch of 24"),
        ({"memory": "much"}, "memory='much'"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        tune(task(), **options)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    from wholebatch.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(EXACT, encoding="utf-8")
    return lambda *arguments: main([str(argument) for argument in arguments])


def test_command(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("tune", "mine.py", "--batch-size", 12, "--micro-batch", "12,6")
    assert command(*arguments) == 0
    shown = capsys.readouterr().out
    assert "recommended" in shown
    assert shown.splitlines()[0].startswith("a window of 1 step took")
    assert "bottleneck: " in shown
    line = next(it for it in shown.splitlines() if "Train with these settings:" in it)
    assert " --execute eager" in line
    # The recommended line is one that train takes.
    words = line.partition("wholebatch ")[2].split()
    assert command(*words, "--updates", 2, "--out", "run") == 0
    capsys.readouterr()
    assert command(*arguments, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["batch_size"] == 12
    assert found["unit"] == "points"


def test_learning_rate_command(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("tune", "mine.py", "--batch-size", 12, "--lr", "auto") == 0
    assert "try a learning rate of" in capsys.readouterr().out
    assert command("tune", "mine.py", "--batch-size", 12, "--lr", "1e-4,1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rates"][0] == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--micro-batch", "8,x"), "--micro-batch 8,x: must be whole numbers"),
        (("--precision", "bf16-pure"), "must be one of full, fp32, bf16, fp16"),
        (("--lr", "1,0.1"), "--lr 1,0.1: must be auto, or two rates"),
        (("--lr", "auto", "--micro-batch", "4,8"), "--micro-batch with --lr: give one size"),
    ],
)
def test_command_refuses(
    command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    assert command("tune", "mine.py", *arguments) == 2
    assert message in capsys.readouterr().err


def test_graph_is_not_recommended_on_a_cpu() -> None:
    found = tune(
        task(), micro_batches=[12], executes=("eager", "graph"), checkpointing=(False,), **QUICK
    )
    assert found.best.setting.execute == "eager"
    graph = next(t for t in found.trials if t.setting.execute == "graph")
    assert not graph.is_measured
    assert "CUDA" in graph.why


def test_range_test() -> None:
    """Plain SGD on a quadratic diverges above a rate of 2 / curvature."""

    def quadratic() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def square(model: Any, micro: Any) -> wb.Loss:
        return wb.Loss(model(micro).square().sum(), len(micro))

    ones = Task(quadratic, square, lambda: torch.ones(4, 1), {"micro_batch": 2})
    found = range_test(ones, low=0.001, high=100.0)
    assert found.diverges is not None
    assert found.diverges > 1.0
    assert found.lowest < found.diverges
    assert "try a learning rate of" in found.advice()[0]
    with pytest.raises(OptionError, match="must be 0 < low < high"):
        range_test(ones, low=1.0, high=0.1)
