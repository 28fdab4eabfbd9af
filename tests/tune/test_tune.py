"""`tune` on real models, small: what it measures, finds and writes; the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb
from tests.cli.helpers import EXACT
from wholebatch.errors import OptionError, WindowError
from wholebatch.memory.predict import predict_peak
from wholebatch.readable_sizes import PARTS
from wholebatch.tune import Limits, Tuned, tune

QUICK = Limits(seconds=0.02, least=2, most=4)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.mix(self.norm(x)))
        return out


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer(), Layer(), nn.Linear(32, 4))
    return model, torch.optim.AdamW(model.parameters())


def loss(model: Any, micro: Any) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def batch(samples: int = 24) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(samples, 32), "y": torch.randint(0, 4, (samples,))}


def test_grouped_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every window has what the objects say; a budget in `wb.Memory` is the budget."""
    given: list[dict[str, Any]] = []
    build = wb.WholeBatch.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        given.append(options)
        build(self, *args, **options)

    monkeypatch.setattr(wb.WholeBatch, "__init__", init)
    found = tune(
        make,
        loss=loss,
        batch={**batch(), "w": torch.ones(24)},
        micro_batches=[12],
        limits=QUICK,
        memory=wb.Memory("1GiB", gradients="host"),
        close=wb.Close(clip_value=0.5, sync="hold"),
        micro_batch=wb.samples(static="w"),
    )
    assert found.budget == 2**30
    assert given
    for options in given:
        assert options["memory"] == wb.Memory(gradients="host")
        assert options["close"] == wb.Close(clip_value=0.5, nonfinite="skip", sync="hold")
        assert options["micro_batch"] == wb.samples(12, static="w")


def test_a_micro_batch_is_not_an_option_of_tune() -> None:
    with pytest.raises(OptionError, match=r"micro_batches= gives the sizes"):
        tune(make, loss=loss, batch=batch(), micro_batch=8)


def test_what_is_found() -> None:
    found = tune(
        make,
        loss=loss,
        batch=batch(),
        micro_batches=[24, 12, 6],
        limits=QUICK,
        unit="rows",
        bandwidth=1e9,
    )
    best = found.best
    assert best.recommended
    assert [trial for trial in found.trials if trial.recommended] == [best]
    assert best.units_per_second == max(
        t.units_per_second or 0.0
        for t in found.trials
        if t.is_measured and t.setting.micro_batch == best.setting.micro_batch
    )
    assert set(best.split) == set(PARTS)
    assert best.split["forward"] > 0
    assert best.split["backward"] > 0
    assert best.split["optimizer"] > 0
    assert best.seconds is not None
    assert sum(best.split.values()) == pytest.approx(best.seconds)  # the whole window is in it
    assert found.settings["batch_size"] == 24
    assert found.settings["micro_batch"] == best.setting.micro_batch
    assert found.ranks is not None
    assert found.ranks["bytes_reduced"] == sum(p.nbytes for p in make()[0].parameters())
    assert json.loads(json.dumps(found.to_dict()))["kind"] == "wholebatch tune"


def test_the_peak_is_the_predicted_one() -> None:
    """On a CPU the two agree but for small tensors: the loss's, the library's own."""
    found = tune(make, loss=loss, batch=batch(), micro_batches=[8], limits=QUICK)
    assert found.best.peak is not None
    assert found.best.predicted is not None
    assert found.best.peak == pytest.approx(found.best.predicted, rel=0.05)


def test_memory_decides() -> None:
    model, optimizer = make()
    whole = batch(256)
    half = {name: value[:128] for name, value in whole.items()}
    budget = predict_peak(model, loss, half, optimizer=optimizer).peak + 100
    found = tune(
        make, loss=loss, batch=whole, memory=budget, micro_batches=[256, 128, 64], limits=QUICK
    )
    largest = next(t for t in found.trials if t.setting.micro_batch == 256 and t.steps == 1)
    assert largest.status == "pruned"
    assert "predicted to need" in largest.why
    assert found.accumulates
    assert found.best.peak is not None
    assert found.best.peak <= budget


def test_it_says_not_to_accumulate() -> None:
    """Where dividing costs as much as computing, the whole batch wins by far."""
    calls = 0

    def slow(model: Any, micro: Any) -> wb.Loss:
        nonlocal calls
        calls += 1
        end = torch.zeros(())
        for _ in range(300):  # what a micro-step costs whatever its size
            end = end + 0.0
        result = loss(model, micro)
        return wb.Loss(result.total + end, result.units)

    found = tune(make, loss=slow, batch=batch(8), micro_batches=[8, 2, 1], limits=QUICK)
    assert calls > 0
    assert not found.accumulates
    assert found.advice[0].startswith("do not accumulate: the batch fits undivided")
    assert found.settings["micro_batch"] == 8


def test_a_setting_that_fails_is_not_taken() -> None:
    def fails(model: Any, micro: Any) -> wb.Loss:
        if len(micro["x"]) > 6 and not isinstance(micro["x"], torch._subclasses.FakeTensor):
            raise torch.OutOfMemoryError("no more")
        return loss(model, micro)

    found = tune(
        make,
        loss=fails,
        batch=batch(12),
        micro_batches=[12, 6, 3],
        checkpointing=(False,),
        limits=QUICK,
    )
    assert found.trials[0].why == "ran out of memory"
    assert found.best.setting.micro_batch <= 6
    with pytest.raises(WindowError, match="no setting could be measured; micro-batch 12, full"):
        tune(
            make,
            loss=fails,
            batch=batch(12),
            micro_batches=[12],
            checkpointing=(False,),
            limits=QUICK,
        )


def test_a_loss_that_is_not_finite_is_not_measured() -> None:
    """Windows that are skipped make no update: their time says nothing."""
    given = {"loss": loss, "batch": {**batch(12), "x": torch.full((12, 32), torch.nan)}}
    with pytest.raises(WindowError, match=r"the first batch is nan.*nothing can be measured") as it:
        tune(make, **given, micro_batches=[12, 6], checkpointing=(False,), limits=QUICK)
    assert str(it.value).count("the first batch is nan") == 1


def test_data_that_is_slow_is_the_bottleneck() -> None:
    import time

    one = batch()

    def slowly() -> Any:
        time.sleep(0.05)
        return one

    found = tune(make, loss=loss, batches=slowly, micro_batches=[24], limits=QUICK)
    assert found.bottleneck.kind == "data"
    assert "% is data" in found.bottleneck.evidence[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give one of them"),
        ({"batch": batch(), "batches": batch}, "give one of them"),
        ({"batch": batch(), "precisions": ("fp4",)}, "precisions: 'fp4' must be one of full"),
        ({"batch": batch(), "executes": ()}, "executes: must name at least one"),
        ({"batch": batch(), "micro_batches": [25]}, "25 must be from 1 to the batch of 24"),
        ({"batch": batch(), "memory": "much"}, "memory='much'"),
    ],
)
def test_what_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        tune(make, loss=loss, **options)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    from wholebatch.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(EXACT, encoding="utf-8")
    return lambda *arguments: main([str(argument) for argument in arguments])


def test_command(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--micro-batch", "12,6", "--bandwidth", "1GB/s", "--ranks", "2,8")
    out = ("--out", "found/tune.json")
    assert command("tune", "mine.py", "--batch-size", 12, *arguments, *out) == 0
    said = capsys.readouterr().out
    assert "Bottleneck: " in said
    assert "Train with these settings: wholebatch train --from found/tune.json" in said
    data = json.loads((tmp_path / "found/tune.json").read_text())
    assert data["settings"]["batch_size"] == 12
    assert data["unit"] == "points"
    assert (tmp_path / "found/tune.html").stat().st_size > 10**6
    # What was found is what is trained.
    assert command("train", "--from", "found/tune.json", "--steps", 2, "--out", "run") == 0
    config = json.loads((tmp_path / "run/config.json").read_text())
    for name, value in data["settings"].items():
        assert config["settings"][name] == value, name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--batch-size", "0"), "--batch-size 0: must be a whole number"),
        (("--precision", "int8"), "--precision int8: must be one of full"),
        (("--micro-batch", "8,x"), "--micro-batch 8,x: must be whole numbers"),
        (("--bandwidth", "fast"), "must be a rate of one rank's link"),
        (("--memory", "some"), "memory='some'"),
        (("--out", "tune.txt"), "must be the name of a .json file"),
        (("--clock", "sun"), "--clock sun: must be one of wall, cpu"),
        (("--seconds", "0"), "--seconds 0: must be above 0"),
        (("--precision", "bf16-pure"), "set it in the recipe's defaults"),
        (("--execute", "fast"), "--execute fast: must be one of eager"),
        (("--execute", ""), "--execute : must be one of eager"),
        (("--seconds", "nan"), "--seconds nan: must be above 0"),
        (("--out", "mine.py/tune.json"), "--out mine.py/tune.json: cannot be written"),
    ],
)
def test_command_refuses(
    command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, str],
    said: str,
) -> None:
    assert command("tune", "mine.py", *arguments) == 2
    assert said in capsys.readouterr().err


def test_tuned_as_data_has_no_holes() -> None:
    found: Tuned = tune(make, loss=loss, batch=batch(4), micro_batches=[4], limits=QUICK)
    text = json.dumps(found.to_dict(), allow_nan=False)
    assert "Infinity" not in text
    with pytest.raises(OptionError, match="cannot be written"):
        found.write(Path("/dev/null/tune.json"))
