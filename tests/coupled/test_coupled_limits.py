"""wb.Coupled at its limits: memory, what is refused, and resuming."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import wholebatch as wb
from tests.coupled.test_coupled_loss import LOSSES, Batch, Clip, batch, coupled, encode
from tests.support import adamw, sgd


def test_out_of_memory_in_either_pass_begins_again() -> None:
    # The third micro-batch of the first pass; the second of the second, from the last to the first.
    for failing in (2, 4):
        model = Clip(dropout=0.3)
        reference = copy.deepcopy(model)
        calls = [0]

        def short(model: Clip, micro: Batch, calls: list[int] = calls, at: int = failing) -> Batch:
            calls[0] += 1
            if calls[0] == at + 1:
                raise torch.OutOfMemoryError("injected")
            return encode(model, micro)

        torch.manual_seed(1)
        loss = wb.Coupled(short, lambda all, m=model: LOSSES["clip"](m, all), keep=0)
        # The probe of the audit would be counted too.
        train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=5, audit=False)
        step = train.step(batch(12))
        assert (train.recoveries, step.micro_batches) == (1, 6)
        # The same update as if it had been split so from the start.
        torch.manual_seed(1)
        plain = wb.WholeBatch(reference, sgd(reference), loss=coupled(reference), micro_batch=2)
        plain.step(batch(12))
        assert all(map(torch.equal, model.parameters(), reference.parameters()))


def test_what_is_refused() -> None:
    model = Clip()
    with pytest.raises(wb.errors.OptionError, match="leave units= out"):
        wb.WholeBatch(model, sgd(model), loss=coupled(model), units=len)
    with pytest.raises(wb.errors.OptionError, match="compile the encoder itself"):
        wb.WholeBatch(model, sgd(model), loss=coupled(model), execute="compile")
    with pytest.raises(wb.errors.OptionError, match=r"must be a function of .* or wb\.Coupled"):
        wb.WholeBatch(model, sgd(model), loss=3)  # type: ignore[arg-type]
    with pytest.raises(wb.errors.OptionError, match="a list or dict of them"):
        wb.WholeBatch([3], sgd(model), loss=coupled(model))  # type: ignore[list-item]


def test_a_run_resumes_between_steps() -> None:
    model = Clip(dropout=0.2)
    optimizer = adamw(model)
    torch.manual_seed(2)
    train = wb.WholeBatch(model, optimizer, loss=coupled(model), micro_batch=4)
    train.step(batch())
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), train.state_dict()))
    train.step(batch(seed=1))
    other = Clip(dropout=0.2)
    again = adamw(other)
    resumed = wb.WholeBatch(other, again, loss=coupled(other), micro_batch=4)
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    resumed.step(batch(seed=1))
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def penalised(model: nn.Module, micro: dict[str, torch.Tensor]) -> torch.Tensor:
    """Representations beside their own derivative by the inputs."""
    x = micro["x"].clone().requires_grad_()
    z = model(x)
    (slope,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    return torch.cat([z, slope], 1)


def with_gradients(model: nn.Module, micro: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.enable_grad():
        return penalised(model, micro)


def compares(z: torch.Tensor) -> wb.Loss:
    total = nn.functional.cross_entropy(z @ z.T, torch.arange(len(z)), reduction="sum")
    return wb.Loss(total, len(z))


def test_an_encode_that_takes_gradients_is_told_how_and_is_exact_so() -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1.0)

    batch = {"x": torch.randn(12, 4, dtype=torch.float64)}
    model, whole = made(), made()
    train = wb.WholeBatch(model, sgd(model), loss=wb.Coupled(penalised, compares), micro_batch=5)
    with pytest.raises(wb.errors.UnsupportedError, match=r"with torch\.enable_grad\(\):"):
        train.step(batch)
    loss = wb.Coupled(with_gradients, compares)
    wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=5).step(batch)
    right = compares(with_gradients(whole, batch))
    (right.total / right.units).backward()
    sgd(whole).step()
    for found, wanted in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)
