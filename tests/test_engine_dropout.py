"""dropout="per-sample": with a seed, the update is the same however the batch is split."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.support import EXACT, distance, sgd
from tests.test_engine_coupled import LOSSES, Clip, batch, coupled, encode
from wholebatch.coupled.sample_draws import PerSample
from wholebatch.options import grouped


class Tagger(nn.Module):
    """Embedding, attention and linear layers, each with dropout; tokens in, logits out."""

    def __init__(self, *, norm: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(11, 8)
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.norm = nn.BatchNorm1d(8) if norm else nn.LayerNorm(8)
        self.drop = nn.Dropout(0.3)
        self.read = nn.Linear(8, 11)
        self.checkpointed = checkpointed

    def block(self, x: Tensor) -> Tensor:
        return x + self.drop(self.attend(x, x, x, need_weights=False)[0])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens))
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        if isinstance(self.norm, nn.BatchNorm1d):
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        else:
            x = self.norm(x)
        logits: Tensor = self.read(self.drop(x))
        return logits


def tokens(number: int = 13, length: int = 6) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(number)
    return {
        "x": torch.randint(0, 11, (number, length), generator=made),
        "y": torch.randint(0, 11, (number, length), generator=made),
    }


def loss(model: nn.Module, micro: Any) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def updates(model: nn.Module, sizes: list[Any], data: Any, how: Any = None, **options: Any) -> Any:
    """One update for each of `sizes`, which are the micro-batches of the windows."""
    model = copy.deepcopy(model)
    optimizer = sgd(model)
    make = loss if how is None else how(model)
    options.setdefault("dropout", "per-sample")
    torch.manual_seed(9)
    state = None
    for size in sizes:
        train = wb.WholeBatch(
            model, optimizer, loss=make, **grouped({"micro_batch": size, **options})
        )
        if state is not None:
            train.load_state_dict(state)
        train.step(data)
        state = train.state_dict()
    return list(model.parameters())


@pytest.mark.parametrize("kind", ["plain", "checkpointed", "batchnorm"])
def test_the_updates_do_not_depend_on_the_split(kind: str) -> None:
    model = Tagger(norm=kind == "batchnorm", checkpointed=kind == "checkpointed").double()
    reference = updates(model, [13, 13, 13], tokens())
    for sizes in ([1, 5, 13], [7, 13, 3]):  # and may change in the middle of a run
        assert distance(updates(model, sizes, tokens()), reference) <= EXACT
    fresh = updates(model, [5, 5, 5], tokens(), dropout="fresh")
    assert distance(fresh, reference) > 1e-4


@pytest.mark.parametrize("norm", [False, True])
def test_nor_with_a_loss_of_the_whole_batch(norm: bool) -> None:
    model = Clip(0.4, norm=norm)
    reference = updates(model, [13, 13], batch(), coupled)
    for sizes in ([2, 6], [13, 1]):
        assert distance(updates(model, sizes, batch(), coupled), reference) <= EXACT


def test_it_is_the_gradient_of_those_masks() -> None:
    """The masks of the undivided batch, taken with it, give the loss that was reported."""
    model = Clip(0.4)
    train = wb.WholeBatch(
        model, sgd(model), loss=coupled(model), micro_batch=4, dropout="per-sample"
    )
    before = copy.deepcopy(model)
    torch.manual_seed(2)
    step = train.step(batch())
    drop = PerSample()
    torch.manual_seed(2)
    drop.begin_window()
    data = batch()
    with drop.micro(range(13)):
        whole = LOSSES["clip"](before, encode(before, data))
        (whole.total / whole.units).backward()
    assert abs(float(whole.total.detach()) / 13 - step.loss) <= 1e-12
    update = [b - a for a, b in zip(model.parameters(), before.parameters(), strict=True)]
    assert distance(update, [0.1 * p.grad for p in before.parameters()]) <= EXACT  # type: ignore[operator]


def test_samples_that_are_sorted_by_length_keep_their_masks() -> None:
    model = Tagger().double()
    data = tokens()
    lengths = torch.tensor([6, 2, 5, 6, 1, 4, 3, 6, 2, 2, 5, 1, 6])
    data["y"] = data["y"].masked_fill(torch.arange(6) >= lengths[:, None], -100)
    data["lengths"] = lengths
    # Padding is not masked in the attention of this model, so nothing is cut off.
    by = wb.tokens(18, lengths="lengths", trim={"x": (), "y": ()})
    reference = updates(model, [13], data)
    assert distance(updates(model, [by], data), reference) <= EXACT


def test_a_window_that_is_cut_for_memory_keeps_its_masks() -> None:
    model = Tagger().double()
    reference = updates(model, [13], tokens())
    failed: list[int] = []

    def short(_: nn.Module) -> Any:
        def fails_once(model: nn.Module, micro: Any) -> wb.Loss:
            if len(micro["y"]) == 6 and not failed:
                failed.append(6)
                raise torch.OutOfMemoryError("injected")
            return loss(model, micro)

        return fails_once

    assert distance(updates(model, [6], tokens(), short, audit=False), reference) <= EXACT
    assert failed


def test_a_window_resumed_in_the_middle_keeps_its_masks() -> None:
    model = Tagger().double()
    reference = updates(model, [4], tokens())
    optimizer = sgd(model)
    train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=4, dropout="per-sample")
    saved: list[Any] = []

    def stop(done: int, of: int) -> None:
        if done == 2:
            saved.append(copy.deepcopy((model.state_dict(), train.state_dict())))
            raise KeyboardInterrupt

    torch.manual_seed(9)
    with pytest.raises(KeyboardInterrupt):
        train.step(tokens(), after_micro=stop)
    torch.manual_seed(123)
    again = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=4, dropout="per-sample")
    again.load_state_dict(saved[0][1])
    again.step(tokens())
    assert distance(model.parameters(), reference) <= EXACT


def test_the_generator_moves_the_same_however_the_batch_is_split() -> None:
    states = []
    for size in (2, 13):
        updates(Tagger().double(), [size, size], tokens())
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_what_is_refused() -> None:
    model = Tagger().double()
    with pytest.raises(wb.errors.OptionError, match='must be "fresh" or "per-sample"'):
        wb.WholeBatch(model, sgd(model), loss=loss, dropout="sample")
    with pytest.raises(wb.errors.OptionError, match="makes its masks in Python"):
        wb.WholeBatch(model, sgd(model), loss=loss, dropout="per-sample", execute="compile")
    for layer in (
        nn.LSTM(4, 4, num_layers=2, dropout=0.1),
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1),
    ):
        with pytest.raises(wb.errors.UnsupportedError, match=f"{type(layer).__name__}"):
            wb.WholeBatch(layer, sgd(layer), loss=loss, dropout="per-sample")

    class TimeFirst(Tagger):
        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = self.read(self.drop(self.embed(tokens).transpose(0, 1)))
            return logits.transpose(0, 1)

    # Six tokens: six is a multiple of three samples and of two, so no shape is odd by itself.
    for size, said in ((3, "the samples are its second dimension"), (4, r"of shape \(6, 4, 8\)")):
        late = TimeFirst().double()
        train = wb.WholeBatch(
            late, sgd(late), loss=loss, micro_batch=size, dropout="per-sample", audit=False
        )
        with pytest.raises(wb.errors.UnsupportedError, match=said):
            train.step(tokens(8))

    class Noisy(nn.Module):
        def __init__(self, draw: Callable[[Tensor], Any]) -> None:
            super().__init__()
            self.read, self.draw = nn.Linear(3, 2), draw

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.read(x + self.draw(x))
            return made

    for draw, said in (
        (torch.randn_like, "knows dropout only"),
        (lambda x: random.random(), "draws random numbers by python"),
        (lambda x: numpy.random.rand(), "draws random numbers by numpy"),
    ):
        noisy = Noisy(draw)
        train = wb.WholeBatch(noisy, sgd(noisy), loss=loss, micro_batch=2, dropout="per-sample")
        with pytest.raises(wb.errors.UnsupportedError, match=said):
            train.step({"x": torch.randn(4, 3), "y": torch.tensor([0, 1, 1, 0])})
