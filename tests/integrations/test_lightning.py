"""Exact windows in Lightning's Trainer and Fabric, against their training on undivided batches."""

from __future__ import annotations

from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from tests.integrations.pages import changed_script, error, plain_script, weights, weights_here
from tests.support import EXACT, Whole, mean, mlp, pieces, samples
from wholebatch.errors import LossError, OptionError, StateError, UnsupportedError, WindowError

pytest.importorskip("lightning")

from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from wholebatch.integrations.lightning import ExactAccumulation, FabricAccumulator

pytestmark = [
    pytest.mark.slow,
    # Lightning's advice about workers, logging intervals and devices, and what it still uses.
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings(
        "ignore::lightning.fabric.utilities.rank_zero.LightningDeprecationWarning"
    ),
    pytest.mark.filterwarnings("ignore:.*(LeafSpec|treespec|isinstance).*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*(LeafSpec|treespec|isinstance).*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*barrier.*:UserWarning"),
]
SIZES = [4, 4, 1, 3, 4, 2, 4]  # windows of 3: the last one has a single micro-batch


@pytest.mark.distributed
def test_the_trainers_diff_on_two_processes(tmp_path: Path, monkeypatch: Any) -> None:
    script = "lightning_trainer.py"
    whole = weights_here(
        plain_script(script), tmp_path, monkeypatch, "--micro-batch", "32", "--steps", "1"
    )
    changed = changed_script("lightning.md", script, tmp_path)
    ours = weights(changed, tmp_path, "--devices", "2")
    assert error(ours, whole) <= EXACT
    assert error(weights_here(plain_script(script), tmp_path, monkeypatch), whole) > 1e-3


def test_fabrics_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "fabric_loop.py"
    whole = weights_here(
        plain_script(script), tmp_path, monkeypatch, "--micro-batch", "16", "--steps", "1"
    )
    changed = changed_script("lightning.md", script, tmp_path, number=1)
    assert error(weights_here(changed, tmp_path, monkeypatch), whole) <= EXACT
    assert error(weights_here(plain_script(script), tmp_path, monkeypatch), whole) > 1e-3


class Module(LightningModule):
    """The classifier of tests/support.py."""

    def __init__(self, *, returns_units: bool = False, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = mlp() if model is None else model
        self.returns_units = returns_units

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss: Tensor = mean(self.model, batch)
        return {"loss": loss, "units": len(batch["y"])} if self.returns_units else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    module: LightningModule,
    callbacks: list[Any],
    *,
    loader: Any = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> Trainer:
    trainer = Trainer(
        **{"max_epochs": 1, "accumulate_grad_batches": 3, **options},
        accelerator="cpu",
        devices=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = loader or DataLoader(pieces(samples(sum(SIZES)), SIZES), batch_size=None)
    fit = partial(trainer.fit, module, loader, ckpt_path=ckpt_path)
    if "weights_only" in signature(trainer.fit).parameters:  # since Lightning 2.6
        fit = partial(fit, weights_only=False)
    fit()
    return trainer


def whole_of(*windows: int, **options: Any) -> Whole:
    whole = Whole(mlp(), **options)
    for batch in pieces(samples(sum(SIZES)), windows):
        whole.step(batch)
    return whole


def test_a_schedule_of_the_window_size() -> None:
    module = Module()
    schedule = GradientAccumulationScheduler(scheduling={0: 3, 1: 2})
    windows = ExactAccumulation(units=lambda batch: len(batch["y"]))
    fit(module, [schedule, windows], accumulate_grad_batches=1, max_epochs=2)
    whole = whole_of(9, 9, 4)
    for batch in pieces(samples(sum(SIZES)), [8, 4, 6, 4]):
        whole.step(batch)
    whole.assert_same(module.model)


class OfABatch(Module):
    """A training_step without batch_idx: Lightning looks at its arguments."""

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return mean(self.model, batch)


class Leave(Callback):
    """Saves after some micro-batches, in the middle of a window, and stops."""

    def __init__(self, after: int, file: Path) -> None:
        self.after, self.file = after, file

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx + 1 == self.after:
            trainer.save_checkpoint(self.file)
            trainer.should_stop = True


class Resumable:
    """A loader that goes on where it was."""

    def __init__(self) -> None:
        self.parts, self.at = pieces(samples(sum(SIZES)), SIZES), 0

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Any:
        while self.at < len(self.parts):
            self.at += 1
            yield self.parts[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_checkpoint_between_windows(tmp_path: Path) -> None:
    file = tmp_path / "window.ckpt"
    clip: dict[str, Any] = {"gradient_clip_val": 0.05}

    def windows() -> ExactAccumulation:
        return ExactAccumulation(units=lambda batch: len(batch["y"]))

    fit(OfABatch(), [windows(), Leave(6, file)], loader=Resumable(), **clip)
    module, resumed = OfABatch(), windows()
    fit(module, [resumed], loader=Resumable(), ckpt_path=file, **clip)
    whole_of(9, 9, 4, clip_norm=0.05).assert_same(module.model)
    assert resumed.state_dict() == {"updates": 3, "open": 0}


def test_a_checkpoint_in_a_window_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "window.ckpt"
    windows = ExactAccumulation(units=lambda batch: len(batch["y"]))
    fit(OfABatch(), [windows, Leave(5, file)], loader=Resumable())
    assert "does not hold the gradient of its 2 micro" in caplog.text
    with pytest.raises(StateError, match=r"2 micro-batches of a window .* after an update"):
        fit(OfABatch(), [ExactAccumulation(len)], loader=Resumable(), ckpt_path=file)


def test_loss_scaling_of_the_precision_plugin() -> None:
    from lightning.pytorch.plugins.precision import MixedPrecision

    class Scaled(MixedPrecision):
        """The loss scale of fp16, without its rounding."""

        def autocast_context_manager(self) -> Any:
            return torch.autocast("cpu", enabled=False)

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    module = Module()
    windows = ExactAccumulation(units=lambda batch: len(batch["y"]))
    plugin = Scaled("16-mixed", "cpu", scaler)
    fit(module, [windows], plugins=[plugin], gradient_clip_val=0.05)
    # The scale is divided out by its reciprocal in float32, a power of two.
    whole_of(9, 9, 4, clip_norm=0.05).assert_same(module.model)
    assert windows.last is not None
    assert windows.last.loss < 2  # the loss itself, not the scaled one


def test_what_the_callback_refuses() -> None:
    with pytest.raises(OptionError, match="must be a function of the batch"):
        ExactAccumulation(units=4)  # type: ignore[arg-type]
    with pytest.raises(LossError, match="wholebatch does not know what the loss is a mean over"):
        fit(Module(), [ExactAccumulation()])
    by_hand = Module()
    by_hand.automatic_optimization = False
    with pytest.raises(UnsupportedError, match=r"use FabricAccumulator or wb.over"):
        fit(by_hand, [ExactAccumulation()], accumulate_grad_batches=1)

    class OfAnIterator(Module):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            return mean(self.model, next(dataloader_iter)[0])

    with (
        pytest.warns(UserWarning, match="dataloader_iter"),
        pytest.raises(UnsupportedError, match=r"take \(batch, batch_idx\)"),
    ):
        fit(OfAnIterator(), [ExactAccumulation(units=len)])

    class WithBackward(Module):
        def backward(self, loss: Any) -> None:
            (2 * loss).backward()

    with pytest.raises(UnsupportedError, match=r"WithBackward overrides backward\(\)"):
        fit(WithBackward(), [ExactAccumulation(units=len)])
    norm = Module(model=nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)).double())
    with pytest.raises(UnsupportedError, match=r"BatchNorm in 'model\.0'"):
        fit(norm, [ExactAccumulation()])


def test_what_fabric_windows_refuse() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    inner = mlp()
    model, optimizer = fabric.setup(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    with pytest.raises(OptionError, match=r"must be what fabric\.setup returned"):
        FabricAccumulator(fabric, model, torch.optim.SGD(inner.parameters(), lr=0.1))
    windows = FabricAccumulator(fabric, model, optimizer)
    windows.backward(mean=mean(model, samples(4)), units=4, last=False)
    with pytest.raises(WindowError, match="last=True"):
        optimizer.step()
    with pytest.raises(StateError, match=r"state_dict\(\) in an open window .*so far: 1\)"):
        windows.state_dict()
    with pytest.raises(OptionError, match=r"without last=: pass last=True"):
        windows.backward(mean=mean(model, samples(2)), units=2)
    done = windows.backward(mean=mean(model, samples(2)), units=2, last=True)
    assert done is not None
    assert (done.units, done.micro_batches, windows.updates) == (6, 2, 1)
    again = FabricAccumulator(fabric, model, optimizer)
    again.load_state_dict(windows.state_dict())
    assert again.updates == 1
    with pytest.raises(StateError, match="not a state dict of wholebatch"):
        again.load_state_dict({})


class FSDPStrategy:
    """By its name: Lightning's own needs several devices."""


def test_fsdp1_is_refused() -> None:
    from wholebatch.integrations.lightning import _check_strategy

    with pytest.raises(UnsupportedError, match=r"FSDPStrategy \(FSDP1\).*ModelParallelStrategy"):
        _check_strategy(FSDPStrategy())


def test_samples_that_a_sampler_repeats_are_told() -> None:
    from wholebatch.integrations.lightning import _warn_of_repeats

    sampler: Any = DistributedSampler(samples(7)["y"], num_replicas=2, rank=0)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="DistributedSampler repeats 1 samples in each epoch"):
        _warn_of_repeats(SimpleNamespace(train_dataloader=SimpleNamespace(sampler=sampler)))  # type: ignore[arg-type]
