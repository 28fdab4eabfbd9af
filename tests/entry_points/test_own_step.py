"""The gradient is made, the step is the user's: `gradient(batch)` and `optimizer=None`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from tests.entry_points.test_on_gradient import (
    SPLITS,
    changed,
    make,
    noise,
    undivided,
    whole_batch,
)
from tests.support import EXACT, distance, mean, mlp, samples
from wholebatch.errors import OptionError, WindowError


@pytest.mark.parametrize("sizes", SPLITS)
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("own", [True, False])
def test_the_gradient_is_left_and_nothing_is_stepped(
    sizes: list[int], clip: float | None, own: bool
) -> None:
    model, batch = mlp(), samples(20)
    before = copy.deepcopy(model)
    _, right, norm = undivided(model, make(False), batch, noise, clip)
    optimizer = None if own else make(False)(model)
    train = whole_batch(model, optimizer, sizes, clip_norm=clip, on_gradient=noise)
    step = train.gradient(batch)
    assert (step.update, train.updates, step.units) == (0, 0, 20.0)
    assert step.grad_norm == pytest.approx(norm, rel=1e-12)
    assert distance([p.grad for p in model.parameters() if p.grad is not None], right) <= EXACT
    assert changed(model, before) == 0.0
    assert optimizer is None or not optimizer.state
    with pytest.raises(WindowError, match=r"0.weight already holds.*After gradient\(\)"):
        train.gradient(batch)
    model.zero_grad()
    train.gradient(batch)


def test_gradients_have_the_dtype_of_the_parameters() -> None:
    model = mlp().bfloat16()
    train = whole_batch(model, None, [3, 17])
    batch = {"x": samples(20)["x"].bfloat16(), "y": samples(20)["y"]}
    train.gradient(batch)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # takes no others
    optimizer.step()
    optimizer.zero_grad()
    train.gradient(batch)


def test_gradients_that_were_kept_are_not_written_to() -> None:
    """A surgery on two gradients (PCGrad) keeps the first while the second is made."""
    model = mlp()
    train = whole_batch(model, None, [3, 17])
    train.gradient(samples(20))
    first = [p.grad for p in model.parameters() if p.grad is not None]
    copies = [gradient.clone() for gradient in first]
    model.zero_grad()
    other = dict(samples(20), y=samples(20)["y"].flip(0))
    train.gradient(other)
    assert all(map(torch.equal, first, copies))


def test_lbfgs() -> None:
    model, batch = mlp(), samples(20)
    reference = copy.deepcopy(model)
    plain = torch.optim.LBFGS(reference.parameters(), max_iter=4)

    def undivided_closure() -> Tensor:
        plain.zero_grad()
        value = mean(reference, batch)
        value.backward()
        return value

    plain.step(undivided_closure)  # type: ignore[no-untyped-call]
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    train = whole_batch(model, None, [3, 11, 6])

    def closure() -> float:
        optimizer.zero_grad()
        return train.gradient(batch).loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    assert distance(model.parameters(), reference.parameters()) <= 1e-10


def test_refusals_without_an_optimizer() -> None:
    model = mlp()
    with pytest.raises(WindowError, match=r"step\(\) with optimizer=None: call gradient"):
        whole_batch(model, None, [4, 4]).step(samples(8))
    with pytest.raises(OptionError, match="ema= with optimizer=None: you make the step"):
        whole_batch(model, None, [8], ema=torch.optim.swa_utils.AveragedModel(model))
    with pytest.raises(OptionError, match="optimizer=None with optimizer_state="):
        whole_batch(model, None, [8], optimizer_state="host")
