"""Exact windows in Accelerate's loop, against its own training on undivided batches."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from tests.distributed.launch import reports
from tests.integrations.pages import changed_script, error, plain_script, weights, weights_here
from tests.support import EXACT, Whole, mean, mlp, pieces, samples
from wholebatch.errors import (
    OptionError,
    StateError,
    UnsupportedError,
    WindowError,
)

accelerate = pytest.importorskip("accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.data_loader import BatchSamplerShard  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402

from wholebatch.integrations.accelerate import AccelerateAccumulator  # noqa: E402
from wholebatch.integrations.handed_over import samples_of_last_batches  # noqa: E402

pytestmark = pytest.mark.slow
SCRIPT = "accelerate_loop.py"
SIZES = [4, 4, 1, 3, 4, 2, 4]  # windows of 3: the last one has a single micro-batch


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps its state in the process."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.mark.distributed
def test_the_pages_diff_on_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = weights_here(
        plain_script(SCRIPT), tmp_path, monkeypatch, "--micro-batch", "32", "--steps", "1"
    )
    ours = weights(changed_script("accelerate.md", SCRIPT, tmp_path), tmp_path)
    assert error(ours, whole) <= EXACT
    AcceleratorState._reset_state(True)
    own = weights_here(plain_script(SCRIPT), tmp_path, monkeypatch)
    assert error(own, whole) > 1e-3


@pytest.mark.distributed
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_deepspeed_on_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    found = reports(Path(__file__).with_name("deepspeed_worker.py"), 2, tmp_path)
    floor = found.pop("one process in float32")  # DeepSpeed's parameters are float32
    assert len(found) == 2
    assert not {case: wrong for case, wrong in found.items() if wrong > floor + 1e-6}


def prepared(model: nn.Module, steps: int = 3, **options: Any) -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loader = DataLoader(pieces(samples(sum(SIZES)), SIZES), batch_size=None)
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def reference(clip_norm: float | None) -> Whole:
    """Undivided batches of plain torch, with the scheduler stepped once per update."""
    whole = Whole(mlp(), clip_norm=clip_norm)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(whole.optimizer, 0.5)
    for batch in pieces(samples(sum(SIZES)), [9, 9, 4]):
        whole.step(batch)
        scheduler.step()
    return whole


def test_a_scaler_is_accelerates() -> None:
    """fp16's loss scale on CPU: it multiplies every backward and is divided out before the step."""
    accelerator, model, optimizer, loader, _ = prepared(mlp())
    accelerator.scaler = optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer.__setstate__(optimizer.__getstate__())
    windows = AccelerateAccumulator(accelerator, model, optimizer)
    whole = Whole(mlp(), clip_norm=0.05)
    for batch in pieces(samples(sum(SIZES)), [9, 9, 4]):
        whole.step(batch)
    for batch in loader:
        with accelerator.accumulate(model):
            windows.backward(mean=mean(model, batch), units=len(batch["y"]))
            if accelerator.sync_gradients:
                accelerator.scaler.unscale_(optimizer.optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    # The scaler's own factor is a float32 tensor, and so is what it is divided out by.
    whole.assert_same(model, at_most=1e-6)


def test_an_incomplete_window_makes_no_step() -> None:
    accelerator, model, optimizer, _, _ = prepared(mlp(), steps=2)
    windows = AccelerateAccumulator(accelerator, model, optimizer)
    with accelerator.accumulate(model):
        windows.backward(mean=mean(model, samples(2)), units=2)
    with accelerator.accumulate(model):  # skips its backward
        with pytest.raises(WindowError, match=r"windows\.flush\(\)"):
            optimizer.step()
        windows.flush()
        optimizer.step()
    whole = Whole(mlp())
    whole.step(samples(2))
    whole.assert_same(model)
    again = AccelerateAccumulator(accelerator, model, optimizer)
    again.load_state_dict(windows.state_dict())
    assert again.updates == 1


def test_a_checkpoint_between_windows(tmp_path: Path) -> None:
    """Saved after six of seven micro-batches, at the end of the second window."""
    resumed_at = 6

    def run(first: int, last: int, *, load: bool = False) -> Any:
        accelerator, model, optimizer, loader, scheduler = prepared(mlp())
        windows = AccelerateAccumulator(accelerator, model, optimizer)
        accelerator.register_for_checkpointing(windows)
        if load:
            accelerator.load_state(str(tmp_path))
        for index, batch in enumerate(loader):
            if not first <= index < last:
                continue
            with accelerator.accumulate(model):
                windows.backward(mean=mean(model, batch), units=len(batch["y"]))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if index + 1 == last:
                accelerator.save_state(str(tmp_path))
                break
        return model

    run(0, resumed_at)
    reference(clip_norm=0.05).assert_same(run(resumed_at, 8, load=True))
    with pytest.raises(StateError, match=r"state_dict\(\) in an open window .*so far: 2\)"):
        run(0, 5)


def test_what_is_refused() -> None:
    accelerator, model, optimizer, _, _ = prepared(mlp())
    with pytest.raises(OptionError, match=r"must be what accelerator\.prepare returned"):
        AccelerateAccumulator(accelerator, model, optimizer.optimizer)
    with pytest.raises(OptionError, match=r"must be an accelerate\.Accelerator"):
        AccelerateAccumulator(object(), model, optimizer)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="BatchNorm in '0'"):
        AccelerateAccumulator(accelerator, nn.Sequential(nn.BatchNorm1d(5), model), optimizer)
    with pytest.raises(OptionError, match="runs the batch undivided"):
        AccelerateAccumulator(accelerator, model, optimizer, batchnorm="exact")


def test_fsdp1_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import DistributedType

    accelerator, model, optimizer, _, _ = prepared(mlp())
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    monkeypatch.setattr(Accelerator, "is_fsdp2", False)
    with pytest.raises(UnsupportedError, match=r"FSDP1 .*set fsdp_version=2"):
        AccelerateAccumulator(accelerator, model, optimizer)


@pytest.mark.parametrize(
    ("samples_", "size", "split", "left"),
    [(14, 3, False, (3, 2)), (12, 3, False, None), (5, 4, True, (2, 1))],
)
def test_samples_that_accelerate_repeats_are_known(
    samples_: int, size: int, split: bool, left: tuple[int, int] | None
) -> None:
    """On two ranks; `size` is that of both where the ranks split a batch."""
    batches = BatchSampler(SequentialSampler(range(samples_)), size, drop_last=False)
    shards = [BatchSamplerShard(batches, 2, rank, split_batches=split) for rank in range(2)]
    state = SimpleNamespace(active_dataloader=SimpleNamespace(batch_sampler=shards[1]))
    accelerator = SimpleNamespace(num_processes=2, gradient_state=state)
    assert samples_of_last_batches(accelerator) == left
    last = [index for shard in shards for index in [*shard][-1]]
    if left is not None:
        assert last[: left[1]] == [*range(samples_ - left[1], samples_)]
