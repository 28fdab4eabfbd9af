"""Convolutions and matrix products of all micro-batches, run on the caller's thread.

PyTorch keeps cuDNN's execution plans, and the handles and workspaces of cuBLAS, per thread. Sixteen
threads would allocate sixteen workspaces, and each would search a plan for every convolution again
in every window. So the micro-batches' threads hand these kernels to the caller's thread. It is
waiting for them anyway, and it already has the plans.

`CallerThreadLayers` does so by convolution and linear layers, which launch nearly all of these
kernels. Other code runs on its own thread with its own plans: slower, with the same result. Where
every operation is intercepted anyway, `execute_on_caller` hands over single operations.

Under autocast the 16-bit copy of a weight is made once for all micro-batches. Its gradients are
summed in one buffer of the weight's own dtype, which the last micro-batch passes to autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from wholebatch.coupled.batchnorm.activation_offload import ActivationPages
from wholebatch.coupled.batchnorm.turn_taking_threads import TurnTakingThreads
from wholebatch.coupled.normalisation_layers import replace_forward
from wholebatch.errors import UnsupportedError

_Call = Callable[[Callable[[], Any]], Any]

_aten = torch.ops.aten
_PER_THREAD = frozenset(
    {
        _aten.convolution.default,
        _aten.convolution_backward.default,
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_cudnn_attention_backward.default,
    }
)
_CONVOLUTIONS = (
    *(nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward),
    *(nn.ConvTranspose1d.forward, nn.ConvTranspose2d.forward, nn.ConvTranspose3d.forward),
)


def execute_on_caller(threads: TurnTakingThreads[Any]) -> Callable[[Any, Any, Any], Any]:
    """Return a function that runs an operation, on the caller's thread if its state is there."""

    def execute(func: Any, args: Any, kwargs: Any) -> Any:
        if func in _PER_THREAD:
            return threads.call(lambda: func(*args, **kwargs))
        return func(*args, **kwargs)

    return execute


@contextmanager
def below_autograd() -> Iterator[None]:
    """Disable autograd and autocast, for operations that were dispatched below them."""
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch._C._AutoDispatchBelowAutograd())
        yield


class CallerThreadLayers:
    """A context in which the layers among `modules` run their kernels on the caller's thread.

    With `pages`, all operations are watched, and handed over already. Then the layers only share
    their casts, which are kept on the device.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        threads: TurnTakingThreads[Any],
        pages: ActivationPages | None,
    ) -> None:
        self._modules = modules
        self._call: _Call = threads.call if pages is None else lambda job: job()
        self._pages = pages
        self._sums = _CastGradients(threads, pages)
        self._casts: dict[tuple[int, torch.dtype, bool], Tensor] = {}
        self._replaced = ExitStack()

    def __enter__(self) -> None:
        for module in self._modules:
            if "forward" in module.__dict__:
                continue  # Other code has replaced it.
            kind = type(module).forward
            if kind in _CONVOLUTIONS and isinstance(module, _ConvNd):
                if module.padding_mode == "zeros" and not isinstance(module.padding, str):
                    replace_forward(self._replaced, module, self._convolution(module))
            elif kind is nn.Linear.forward and isinstance(module, nn.Linear):
                replace_forward(
                    self._replaced,
                    module,
                    lambda x, own=module: _apply_linear(*self._cast(x, own), self._call),
                )

    def __exit__(self, kind: object, *error: object) -> None:
        self._replaced.close()
        self._casts.clear()
        if kind is None:
            self._sums.add_the_rest()

    def _convolution(self, module: _ConvNd) -> Callable[..., Tensor]:
        found: Callable[..., Tensor] = module.forward
        dimensions = len(module.stride)
        stride, kernel = list(module.stride), list(module.kernel_size)
        padding = [int(size) for size in module.padding]

        def forward(x: Tensor, output_size: list[int] | None = None) -> Tensor:
            transposed = isinstance(module, _ConvTransposeNd)
            if x.dim() != dimensions + 2:  # A single sample without a batch dimension.
                return found(x, output_size) if transposed else found(x)
            extra = [0] * dimensions
            if isinstance(module, _ConvTransposeNd):
                extra = module._output_padding(
                    x, output_size, stride, padding, kernel, dimensions, list(module.dilation)
                )
            x, weight, bias = self._cast(x, module)
            options = (stride, padding, module.dilation, transposed, extra, module.groups)
            return _convolve(x, weight, bias, options, self._call)

        return forward

    def _cast(self, x: Tensor, module: nn.Module) -> tuple[Tensor, Any, Any]:
        """Return the input, weight and bias of a layer, cast as autocast would."""
        kind = x.device.type
        casts = torch.is_autocast_enabled(kind) and x.is_floating_point()
        if not casts or x.dtype == torch.float64:
            return x, module.weight, module.bias
        dtype = torch.get_autocast_dtype(kind)
        return x.to(dtype), self._shared(module.weight, dtype), self._shared(module.bias, dtype)

    def _shared(self, parameter: Any, dtype: torch.dtype) -> Any:
        """Return one cast copy of a weight for all micro-batches, like autocast's cache."""
        if parameter is None or parameter.dtype in (dtype, torch.float64):
            return parameter
        key = (id(parameter), dtype, torch.is_grad_enabled())
        if key not in self._casts:
            self._casts[key] = _cast_once(parameter, dtype, self._sums)
            if self._pages is not None:
                self._pages.keep(self._casts[key])
        return self._casts[key]


@dataclass(eq=False)
class _CastGradients:
    """Summed gradients of weights that were cast for all micro-batches, in the weights' dtypes."""

    threads: TurnTakingThreads[Any]
    pages: ActivationPages | None
    _held: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def add(self, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        """Add a gradient; return the sum if this is the last micro-batch, else None."""
        if id(parameter) in self._held:
            buffer = self._held.pop(id(parameter))[1].add_(gradient)
        else:
            buffer = gradient.to(parameter.dtype)
            if self.pages is not None:
                self.pages.keep_sum(buffer)
        if self.threads.party == self.threads.parties - 1:
            return buffer
        self._held[id(parameter)] = parameter, buffer
        return None

    @torch.no_grad()
    def add_the_rest(self) -> None:
        """Add the sums of weights that the last micro-batch did not use to `.grad`."""
        for parameter, buffer in self._held.values():
            parameter.grad = buffer if parameter.grad is None else parameter.grad.add_(buffer)
        self._held.clear()


class _CastOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, dtype: torch.dtype, sums: _CastGradients) -> Tensor:
        ctx.parameter, ctx.sums = parameter, sums
        return parameter.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        return ctx.sums.add(ctx.parameter, gradient), None, None


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: Any, call: _Call
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options, ctx.call = options, call
        ctx.bias_sizes = None if bias is None else list(bias.shape)
        out: Tensor = call(lambda: torch.convolution(x, weight, bias, *options))
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        x, weight = ctx.saved_tensors
        mask = list(ctx.needs_input_grad[:3])
        dx, dweight, dbias = ctx.call(
            lambda: _aten.convolution_backward.default(
                dy, x, weight, ctx.bias_sizes, *ctx.options, mask
            )
        )
        return dx, dweight, dbias, None, None


class _CallerThreadLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.call = call
        out: Tensor = call(lambda: F.linear(x, weight, bias))
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad

        def gradients() -> tuple[Tensor | None, Tensor | None, Tensor | None]:
            rows = dy.reshape(-1, dy.shape[-1])
            dx = dy @ weight if needs[0] else None
            dweight = rows.T @ x.reshape(-1, x.shape[-1]) if needs[1] else None
            return dx, dweight, rows.sum(0) if needs[2] else None

        return *ctx.call(gradients), None


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "a second derivative (create_graph=True) beside exact BatchNorm is not possible"
        )


_cast_once: Callable[..., Tensor] = _CastOnce.apply
_convolve: Callable[..., Tensor] = _Convolve.apply
_apply_linear: Callable[..., Tensor] = _CallerThreadLinear.apply
