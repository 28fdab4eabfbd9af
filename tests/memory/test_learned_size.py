"""A micro-batch that does not fit: later windows begin with what does."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.support import Whole, grouped, loss, mlp, samples, sgd

WINDOWS = 12


class Device:
    """A device that holds so many samples at once."""

    def __init__(self, model: nn.Module, fits: int) -> None:
        self.fits = fits
        self.failures = 0
        model.register_forward_hook(self._forward)

    def _forward(self, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if len(inputs[0]) > self.fits:
            self.failures += 1
            raise torch.OutOfMemoryError(f"no room for {len(inputs[0])} samples")


def dropped() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).double()


def trained(
    micro_batch: Any, fits: int | None, windows: int = WINDOWS, **options: Any
) -> tuple[nn.Module, wb.WholeBatch, Device]:
    model = dropped()
    device = Device(model, fits or 10**6)
    train = wb.WholeBatch(
        model,
        sgd(model),
        loss=loss,
        audit=False,
        **grouped({"micro_batch": micro_batch, **options}),
    )
    torch.manual_seed(8)
    for number in range(windows):
        train.step(samples(64 + number % 2))
    return model, train, device


@pytest.mark.parametrize(("given", "fits", "learned"), [(16, 4, 4), (64, 8, 8), (32, 5, 4)])
def test_a_handful_of_restarts_in_all(given: int, fits: int, learned: int, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, logger="wholebatch"):
        model, train, device = trained(given, fits)
    assert train.micro_batch_size == learned
    assert train.recoveries == device.failures <= 4
    said = [r.getMessage() for r in caplog.records if "out of memory" in r.getMessage()]
    assert len(said) == train.recoveries
    assert said[0] == (
        f"out of memory: micro-batches of {given} samples are now of {given // 2} at most, and the "
        f"window starts again (no room for {given} samples)"
    )
    right, plain, _ = trained(learned, None)
    assert plain.recoveries == 0
    assert all(map(torch.equal, model.parameters(), right.parameters()))


def test_shorter_sequences_keep_their_size_after_a_long_batch_has_failed() -> None:
    """What is learned is a number of bytes: another long batch does not fail again."""
    model = mlp()
    sizes: list[int] = []

    def holds_64_tokens(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        sizes.append(len(inputs[0]))
        if inputs[0].shape[:2].numel() > 64:
            raise torch.OutOfMemoryError("too many tokens")

    model.register_forward_hook(holds_64_tokens)
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=8, audit=False)
    whole = Whole(
        mlp(),
        loss=lambda m, b: nn.functional.cross_entropy(m(b["x"]).flatten(0, 1), b["y"].flatten()),
    )
    made = []
    for seed, length in enumerate((8, 16, 8, 16, 4, 32)):
        sizes.clear()
        train.step(sequences(seed, length))
        whole.step(sequences(seed, length))
        made.append(max(sizes[-train.last_step.micro_batches :]))
    assert made == [8, 4, 8, 4, 8, 2]
    assert train.recoveries == 1
    whole.assert_same(model)


def sequences(seed: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(32, length, 5, generator=generator, dtype=torch.float64),
        "y": torch.randint(0, 3, (32, length), generator=generator),
    }


def test_state_keeps_what_was_learned() -> None:
    _, train, _ = trained(16, 4, windows=1)
    saved = train.state_dict()
    model = dropped()
    device = Device(model, 4)
    again = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=16, audit=False)
    again.load_state_dict(saved)
    assert again.micro_batch_size == 4
    again.step(samples(64))
    assert device.failures == 0

    other = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=8)
    other.load_state_dict(saved)
    assert other.micro_batch_size == 8  # another size is the user's new word
