"""A run that is stopped after any window and resumed ends bit-identical."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import wholebatch as wb
from tests.support import mlp, pieces, samples, sgd, summed


def dropout_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(4, 12), nn.BatchNorm1d(12, momentum=None), nn.Dropout(0.4), nn.Linear(12, 3)
    )


def build(fresh_seed: int, generator: bool) -> tuple[nn.Module, Any, Any, wb.Accumulator]:
    torch.manual_seed(fresh_seed)
    model = dropout_model()
    torch.manual_seed(fresh_seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    acc = wb.Accumulator(
        model, optimizer, steps={0: 3, 2: 4}, scheduler=scheduler, batchnorm="allow"
    )
    data = TensorDataset(torch.linspace(-1, 1, 88).reshape(22, 4), torch.arange(22) % 3)
    own = torch.Generator().manual_seed(1) if generator else None
    return model, optimizer, DataLoader(data, batch_size=2, shuffle=True, generator=own), acc


def train(parts: Any, *, stop_after: int | None = None) -> Any:
    """Train to the end, or return the state after so many updates."""
    model, _, loader, acc = parts
    while acc.epoch < 2:
        for x, y in acc.over(loader):
            x = x + 0.01 * torch.randn_like(x) + 0.001 * random.random()
            total = nn.functional.cross_entropy(model(x), y, reduction="sum")
            if acc.backward(total, units=len(y)) is not None and acc.updates == stop_after:
                return saved(parts)
        if acc.updates == stop_after:  # the short last window closes when the loader has ended
            return saved(parts)
    return [p.detach().clone() for p in model.state_dict().values()]


def saved(parts: Any) -> bytes:
    model, optimizer, _, acc = parts
    buffer = io.BytesIO()
    torch.save(
        {"m": model.state_dict(), "o": optimizer.state_dict(), "a": acc.state_dict()}, buffer
    )
    return buffer.getvalue()


@pytest.mark.parametrize("generator", [False, True])
def test_stopped_after_any_window(generator: bool) -> None:
    torch.manual_seed(1)
    random.seed(1)
    straight = train(build(1, generator))
    for stop in range(1, 8):
        random.seed(1)
        stopped = train(build(1, generator), stop_after=stop)
        random.seed(99)
        model, optimizer, loader, acc = build(99, generator)
        state = torch.load(io.BytesIO(stopped), weights_only=False)
        model.load_state_dict(state["m"])
        optimizer.load_state_dict(state["o"])
        acc.load_state_dict(state["a"])
        torch.randn(3)  # what happens between loading and the loop does not matter
        resumed = train((model, optimizer, loader, acc))
        assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True)), stop


def test_a_state_in_the_middle_of_a_window_is_refused() -> None:
    model, parts = mlp(), pieces(samples(6), [1] * 6)
    acc = wb.Accumulator(model, sgd(model), steps=4)
    acc.backward(summed(model, parts[0]), units=1)
    with pytest.raises(
        wb.errors.StateError, match=r"so far: 1\): save where backward\(\) or run\(\) returned"
    ):
        acc.state_dict()
    acc.discard()
    for _ in acc.over(parts):
        with pytest.raises(wb.errors.StateError, match="before this item was used"):
            acc.state_dict()
        break
    train = wb.WholeBatch(model, sgd(model), loss=saves_inside, micro_batch=2)
    saves_inside.train = train  # type: ignore[attr-defined]
    with pytest.raises(wb.errors.StateError, match=r"inside step\(\).*save after the Step"):
        train.step(samples(6))


def saves_inside(model: nn.Module, micro: Any) -> wb.Loss:
    saves_inside.train.state_dict()  # type: ignore[attr-defined]
    return wb.cross_entropy(model(micro["x"]), micro["y"])


class Positioned:
    """A loader that keeps its own position, as torchdata's StatefulDataLoader does."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        items = pieces(samples(6), [1] * 6)
        while self.at < 6:
            self.at += 1
            yield items[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_loader_that_keeps_its_own_position() -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=4)
    for index, micro in enumerate(acc.over(Positioned())):
        acc.backward(summed(model, micro), units=1)
        if index == 3:
            break
    state = acc.state_dict()
    acc = wb.Accumulator(model, sgd(model), steps=4)
    acc.load_state_dict(state)
    rest = [
        float(micro["x"][0, 0]) for micro in acc.over(Positioned()) if _trained(acc, model, micro)
    ]
    assert rest == [float(m["x"][0, 0]) for m in pieces(samples(6), [1] * 6)[4:]]
    acc.load_state_dict(state)
    with pytest.raises(wb.errors.StateError, match="kept its own position"):
        next(acc.over([1, 2, 3]))


def _trained(acc: wb.Accumulator, model: nn.Module, micro: Any) -> bool:
    acc.backward(summed(model, micro), units=1)
    return True


def test_states_that_do_not_belong_are_refused() -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=4)
    state = acc.state_dict()
    with pytest.raises(wb.errors.StateError, match="not a state dict of wholebatch"):
        acc.load_state_dict({})
    with pytest.raises(wb.errors.StateError, match="format 99"):
        acc.load_state_dict({**state, "format": 99})
    with pytest.raises(wb.errors.StateError, match="state dict of WholeBatch"):
        acc.load_state_dict({**state, "kind": "WholeBatch"})
    acc.load_state_dict(state)
    with pytest.raises(wb.errors.StateError, match="ended after 0 micro-batches"):
        feed = {
            "fetched": 2,
            "random": state["random"],
            "generators": [],
            "loader": None,
        }
        acc.load_state_dict({**state, "feed": feed})
        next(acc.over([]))
