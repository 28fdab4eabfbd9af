"""BatchNorm over data-parallel ranks, with the statistics of the global batch.

torch's `nn.SyncBatchNorm` computes the same, but has no CPU kernels. One function serves CPUs and
GPUs here. With S(v) the sum of v over all values of a channel and over the ranks, and N their
number:

    mean = S(x) / N        var = S((x - mean)²) / N        x̂ = (x - mean) / sqrt(var + eps)

    dx = w / sqrt(var + eps) · (dy - S(dy) / N - x̂ · S(dy · x̂) / N)

The gradients of weight and bias are sums over this rank's samples, like those of any other
parameter. The window adds them up over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.coupled.normalisation_layers import BatchNorm, uses_batch_statistics
from wholebatch.errors import UnsupportedError
from wholebatch.window.replaced_attributes import replaced_attributes

Reduce = Callable[[Tensor], Tensor]
"""A function that returns the sum of a tensor over the data-parallel ranks."""

_PLAIN = (BatchNorm.forward, nn.SyncBatchNorm.forward)
"""Forwards that normalise, and do nothing else."""


@contextmanager
def norms_over_ranks(norms: Sequence[tuple[str, nn.Module]], summed: Reduce) -> Iterator[None]:
    """Let BatchNorms in training mode use the statistics of all ranks within this context."""
    with ExitStack() as restored:
        for name, module in norms:
            if not isinstance(module, BatchNorm):
                if module.training:
                    raise UnsupportedError(
                        f"{name!r} ({type(module).__name__}) keeps running statistics, which would "
                        "differ between ranks: create it with track_running_stats=False"
                    )
                continue
            if not uses_batch_statistics(module):
                continue
            if type(module).forward not in _PLAIN or "forward" in vars(module):
                raise UnsupportedError(
                    f"{name!r} ({type(module).__name__}) is a BatchNorm with a custom forward, "
                    "which uses the statistics of one rank: use nn.BatchNorm1d to 3d, or "
                    'batchnorm="freeze"'
                )
            forward = partial(_forward, module, summed)
            restored.enter_context(replaced_attributes(module, forward=forward))
        yield


def _forward(module: Any, summed: Reduce, input: Tensor) -> Tensor:
    """Run the training-mode forward of `module` with the statistics of all ranks."""
    normalised: Any = _Normalise.apply(input, module.weight, module.bias, module.eps, summed)  # type: ignore[no-untyped-call]
    y, mean, var, count = normalised
    if module.track_running_stats:
        _update_running(module, mean, var * (count / (count - 1)))
    result: Tensor = y
    return result


@torch.no_grad()
def _update_running(module: Any, mean: Tensor, unbiased_var: Tensor) -> None:
    """Set running = (1 - momentum) · running + momentum · batch, as one forward of torch's does."""
    assert module.num_batches_tracked is not None
    module.num_batches_tracked.add_(1)
    momentum = module.momentum
    if momentum is None:  # the mean over all batches
        momentum = 1.0 / float(module.num_batches_tracked)
    for buffer, value in ((module.running_mean, mean), (module.running_var, unbiased_var)):
        assert buffer is not None
        buffer.copy_(buffer * (1.0 - momentum) + value * momentum)


class _Normalise(torch.autograd.Function):
    """Normalise with the mean and variance over all ranks; return these and the count, too."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        summed: Reduce,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = _wide(x)
        own = wide.new_full((1,), x.numel() // x.shape[1])
        sums = summed(torch.cat([wide.sum(_but_channels(x)), own]))
        count = sums[-1]
        if count < 2:
            raise ValueError(
                "BatchNorm in training mode needs more than one value per channel over all ranks, "
                f"got an input of shape {tuple(x.shape)}"
            )
        mean = sums[:-1] / count
        centred = wide - _along(mean, x)
        var = summed(centred.square().sum(_but_channels(x))) / count
        normalised = centred.mul_(_along(torch.rsqrt(var + eps), x))
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps), count)
        ctx.summed = summed
        ctx.bias_dtype = None if bias is None else bias.dtype
        y = normalised
        if weight is not None and bias is not None:
            y = normalised * _along(weight.to(wide.dtype), x) + _along(bias.to(wide.dtype), x)
        ctx.mark_non_differentiable(mean, var, count)
        return y.to(x.dtype), mean, var, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, count = ctx.saved_tensors
        wide, dims = _wide(dy), _but_channels(x)
        normalised = (_wide(x) - _along(mean, x)) * _along(invstd, x)
        own = torch.cat([wide.sum(dims), (wide * normalised).sum(dims)])
        dbias, dweight = own.chunk(2)
        of_dy, of_both = (ctx.summed(own) / count).chunk(2)
        factor = invstd if weight is None else invstd * weight.to(wide.dtype)
        dx = wide - _along(of_dy, x) - normalised * _along(of_both, x)
        return (
            (dx * _along(factor, x)).to(x.dtype),
            None if weight is None else dweight.to(weight.dtype),
            None if ctx.bias_dtype is None else dbias.to(ctx.bias_dtype),
            None,
            None,
        )


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _but_channels(x: Tensor) -> list[int]:
    """Return all dimensions but that of the channels, dimension 1."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _along(values: Tensor, x: Tensor) -> Tensor:
    """Return one value per channel in a shape that broadcasts to `x`."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
