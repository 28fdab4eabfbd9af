"""A micro-batch that does not fit in two windows in a row: later windows begin with what does."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.support import EXACT, Whole, mlp, samples, sgd
from wholebatch.options import grouped

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


def loss(model: nn.Module, micro: Any) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


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
    assert train.recoveries == device.failures <= 8
    said = [r.getMessage() for r in caplog.records if "does not fit" in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(
        f"micro_batch={given} does not fit: from now on micro-batches have {learned} samples"
    )
    right, plain, _ = trained(learned, None)
    assert plain.recoveries == 0
    assert all(map(torch.equal, model.parameters(), right.parameters()))


def test_one_long_batch_is_an_accident_and_cuts_one_micro_batch() -> None:
    model = mlp()
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=8, audit=False)
    calls = []

    def fails_once(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append(len(inputs[0]))
        if len(calls) == 3:
            raise torch.OutOfMemoryError("once")

    model.register_forward_hook(fails_once)
    whole = Whole(mlp())
    whole.step(samples(32))
    assert train.step(samples(32)).micro_batches == 5
    whole.assert_same(model)
    assert train.step(samples(32)).micro_batches == 4  # the next window begins as before
    assert train.micro_batch_size == 8


@pytest.mark.parametrize("sizes", [7, 13, 29])
def test_the_update_is_that_of_the_whole_batch(sizes: int) -> None:
    model = mlp()
    device = Device(model, 3)
    whole = Whole(mlp())
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=sizes, audit=False)
    for number in (29, 30, 31):
        train.step(samples(number))
        whole.step(samples(number))
    whole.assert_same(model, at_most=EXACT)
    assert device.failures <= 8


def test_budgets_of_tokens_are_learned_too() -> None:
    def batch(seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            "x": torch.randn(32, 6, 5, generator=generator, dtype=torch.float64),
            "y": torch.randint(0, 3, (32, 6), generator=generator),
        }

    model = mlp()
    device = Device(model, 4)
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=wb.tokens(96), audit=False)
    whole = Whole(
        mlp(),
        loss=lambda m, b: nn.functional.cross_entropy(m(b["x"]).flatten(0, 1), b["y"].flatten()),
    )
    for seed in range(5):
        train.step(batch(seed))
        whole.step(batch(seed))
    assert device.failures <= 6
    assert train.micro_batch_size is None
    whole.assert_same(model)


def test_state_keeps_what_was_learned() -> None:
    _, train, _ = trained(16, 4, windows=2)
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


def test_memory_that_never_suffices_still_ends() -> None:
    model = mlp()
    Device(model, 0)
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=16)
    with pytest.raises(torch.OutOfMemoryError, match="has one sample and does not fit"):
        train.step(samples(64))
    assert train.recoveries == 4
