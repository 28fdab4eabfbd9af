"""Code of the user's in an optimizer's step sees the gradient of the undivided batch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import wholebatch as wb
from tests.support import distance, mean, mlp, pieces, samples, summed
from wholebatch.errors import UnsupportedError

KINDS: dict[str, Any] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
}


class Reads(torch.optim.AdamW):
    """A subclass whose step reads `.grad` before torch's own does."""

    recorded: list[Tensor]

    def step(self, closure: Any = None) -> Any:
        self.seen = [p.grad.clone() for group in self.param_groups for p in group["params"]]
        return super().step(closure)


class Initialises(torch.optim.AdamW):
    """A subclass that leaves the step alone, and reads `.grad` on the way."""

    recorded: list[Tensor]

    def _init_group(self, group: Any, *rest: Any) -> Any:
        self.seen = [p.grad.clone() for p in group["params"]]
        return super()._init_group(group, *rest)


def right_gradients(model: nn.Module, batch: Any, clip: float | None) -> list[Tensor]:
    model = copy.deepcopy(model)
    mean(model, batch).backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    return [p.grad for p in model.parameters() if p.grad is not None]


def window(model: nn.Module, optimizer: Any, batch: Any, clip: float | None) -> None:
    acc = wb.Accumulator(model, optimizer, steps=3, clip_norm=clip)
    for micro in acc.over(pieces(batch, [3, 11, 6])):
        acc.backward(summed(model, micro), units=len(micro["y"]))
    assert acc.updates == 1


@contextmanager
def watched(way: str, optimizer: torch.optim.Optimizer, recorded: list[Tensor]) -> Iterator[None]:
    def look(*_: Any) -> None:
        recorded.extend(p.grad.clone() for g in optimizer.param_groups for p in g["params"])

    handles: list[Any] = []
    if way == "pre-hook":
        optimizer.register_step_pre_hook(look)
    elif way == "post-hook":
        optimizer.register_step_post_hook(look)
    elif way == "global pre-hook":
        handles.append(register_optimizer_step_pre_hook(look))
    elif way == "global post-hook":
        handles.append(register_optimizer_step_post_hook(look))
    else:
        original = optimizer.step

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            look()
            return original(*args, **kwargs)

        optimizer.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


WAYS = ["pre-hook", "post-hook", "global pre-hook", "global post-hook", "replaced"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_fused_optimizers(kind: str, way: str, clip: float | None) -> None:
    model = mlp(dtype=torch.float32)
    batch = samples(20, dtype=torch.float32)
    right = right_gradients(model, batch, clip)
    optimizer = KINDS[kind](model.parameters(), lr=0.01, fused=True)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)  # wraps the step too
    recorded: list[Tensor] = []
    with watched(way, optimizer, recorded):
        window(model, optimizer, batch, clip)
    assert distance(recorded, right) <= 1e-6


@pytest.mark.parametrize("kind", [Reads, Initialises])
def test_a_subclass_that_reads_gradients(kind: Any) -> None:
    model = mlp(dtype=torch.float32)
    batch = samples(20, dtype=torch.float32)
    right = right_gradients(model, batch, 0.05)
    optimizer = kind(model.parameters(), fused=True)
    window(model, optimizer, batch, 0.05)
    assert distance(optimizer.seen, right) <= 1e-6


@pytest.mark.parametrize("way", ["pre-hook", "global pre-hook", "replaced"])
@pytest.mark.parametrize("late", [False, True])
def test_optimizer_state_on_the_host_refuses_them(way: str, late: bool) -> None:
    model = mlp(dtype=torch.float32)
    batch = samples(20, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def made() -> wb.WholeBatch:
        return wb.WholeBatch(
            model,
            optimizer,
            loss=lambda m, micro: wb.cross_entropy(m(micro["x"]), micro["y"]),
            units=lambda micro: len(micro["y"]),
            micro_batch=8,
            memory=wb.Memory(optimizer_state="host"),
        )

    before = copy.deepcopy(model)
    train = made() if late else None
    what = "a step\\(\\) that was replaced" if way == "replaced" else "a step pre-hook"
    with (
        watched(way, optimizer, []),
        pytest.raises(
            UnsupportedError,
            match=f'optimizer_state="host" with {what}.*AdamW',
        ),
    ):
        (train or made()).step(batch)
    assert distance(model.parameters(), before.parameters()) == 0.0
    if train is not None and way == "global pre-hook":  # it is gone again, and nothing is spoiled
        train.step(batch)
