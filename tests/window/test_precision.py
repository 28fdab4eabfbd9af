"""Autocast with one cast per window, fp16 loss scaling, fp32 accumulation of 16-bit gradients."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import wholebatch as wb
from tests.support import Seen, adamw, distance, loss, mlp, pieces, samples, sgd, summed
from wholebatch.window import precision


@pytest.mark.parametrize(("make", "dtype"), [(sgd, torch.bfloat16), (adamw, torch.float16)])
def test_256_micro_batches_of_16_bit_gradients_add_up_in_fp32(make: Any, dtype: Any) -> None:
    model = mlp(dtype=dtype)
    batch = samples(256, dtype=dtype)
    optimizer = make(model)
    acc = wb.Accumulator(model, optimizer, steps=257)
    parameters = list(model.parameters())
    right = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    rounded = [torch.zeros_like(p) for p in parameters]
    for micro in pieces(batch, [1] * 256):
        total = summed(model, micro)
        for exact, sixteen, gradient in zip(
            right, rounded, torch.autograd.grad(total, parameters), strict=True
        ):
            exact += gradient.double()
            sixteen += gradient
        acc.backward(summed(model, micro), units=1)
    held = [p.grad for p in parameters]
    assert all(g is not None and g.dtype is torch.float32 for g in held)
    assert distance([g for g in held if g is not None], right) <= 1e-6
    assert distance(rounded, right) > 1e-3  # what adding in 16 bit would have given

    recorded = Seen(model, optimizer)
    acc.flush()
    mean = [exact / 256 for exact in right]
    once = [m.to(dtype) for m in mean]
    assert distance(recorded.gradients[0], mean) <= 1.01 * distance(once, mean)
    assert all(p.grad is None and p.grad_dtype is dtype for p in parameters)


@pytest.mark.parametrize("way", ["backward", "run", "whole"])
def test_an_autocast_around_the_loop_sees_the_new_weights(way: str) -> None:
    """Autocast keeps its casts of the weights until it is left: the window drops them."""

    def trained(around: bool) -> nn.Module:
        model = mlp(dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=2, precision="bf16")
        acc = wb.Accumulator(model, optimizer, steps=2)
        run = partial(loss, model)
        autocast = partial(torch.autocast, "cpu", torch.bfloat16)
        with autocast() if around else nullcontext():
            for micro in pieces(samples(24, dtype=torch.float32), [4, 2, 3, 3] * 2):
                with nullcontext() if around else autocast():
                    if way == "whole":
                        train.step(micro)
                    elif way == "run":
                        acc.run(run, micro)
                    else:
                        acc.backward(run(micro))
        return model

    one, other = (list(trained(around).parameters()) for around in (False, True))
    assert all(map(torch.equal, one, other))


class Casts(TorchDispatchMode):
    """Counts the casts of fp32 matrices to bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype is torch.bfloat16:
            self.weights += tuple(out.shape) in ((16, 5), (16, 16), (3, 16))
        return out


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_scaler_backs_off_skips_and_grows(fused: bool) -> None:
    model = mlp(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=2)
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=loss,
        micro_batch=5,
        precision="fp16",
        clip_norm=1.0,
        close=wb.Close(scaler=scaler),
    )
    before = copy.deepcopy(model.state_dict())
    batch = samples(12, dtype=torch.float32)
    step = train.step(batch)
    assert step.skipped is not None
    assert "loss scale" in step.skipped
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert scaler.get_scale() == 2.0**59
    while train.updates == 0:
        step = train.step(batch)
    assert step.skipped is None
    scale = scaler.get_scale()
    train.step(batch)
    assert scaler.get_scale() == 2 * scale  # two good updates
    assert train.skipped > 20


def test_a_loss_that_is_not_finite_is_no_matter_of_the_loss_scale() -> None:
    model = mlp(dtype=torch.float32)
    batch = samples(6, dtype=torch.float32)
    batch["x"][1] = float("nan")
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=2, precision="fp16")
    with pytest.raises(wb.errors.NonFiniteError, match="micro-batch 1 of 3 has a loss"):
        train.step(batch)


def test_refusals() -> None:
    model = mlp()
    with pytest.raises(wb.errors.OptionError, match="precision='fp4': must be 'full'"):
        wb.WholeBatch(model, sgd(model), loss=loss, precision="fp4")
    with pytest.raises(wb.errors.OptionError, match="bf16 has the range of fp32"):
        wb.WholeBatch(
            model,
            sgd(model),
            loss=loss,
            precision="bf16",
            close=wb.Close(scaler=torch.amp.GradScaler("cpu")),
        )
    with pytest.raises(wb.errors.OptionError, match=r"must be a torch\.amp\.GradScaler"):
        wb.Accumulator(model, sgd(model), steps=1, close=wb.Close(scaler="auto"))  # type: ignore[arg-type]
    assert isinstance(precision.choose("fp32", "cpu"), precision.Full)


def test_a_16_bit_loss_is_not_scaled_by_a_rounded_number() -> None:
    """1/23 in bf16 is 0.2% off, and so would be the whole gradient."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = sgd(model)
    recorded = Seen(model, optimizer)
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=lambda m, x: wb.Loss(m(x).sum(), len(x)),
        units=len,
        micro_batch=1,
    )
    train.step(torch.ones(23, 1, dtype=torch.bfloat16))
    assert abs(recorded.gradients[0][0].item() - 1.0) <= 1e-6
