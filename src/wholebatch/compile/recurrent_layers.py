"""torch's recurrent layers (`nn.LSTM`, `nn.GRU`, `nn.RNN`) as one operation of a traced graph.

torch's own trace unrolls them over time: some 20 operations for each step and layer, instead of one
kernel of cuDNN. The operation here calls that kernel. Its backward runs the forward again, because
what cuDNN keeps for its backward cannot be handed over; so a layer costs one forward more.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import _VF, Tensor

RECURRENT: dict[str, Callable[..., Any]] = {
    kind: getattr(_VF, kind) for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}
"""torch's functions of recurrent layers, as they are outside of a trace."""
_OPTIONS = "str kind, int states, bool biases, int layers, bool bidirectional, bool batch_first"


def traceable(kind: str) -> Callable[..., Any]:
    """Return a replacement for `torch._VF.lstm` and its like that is one operation."""

    def function(*args: Any) -> Any:
        # Packed sequences have their sizes in second place; torch's own trace unrolls those.
        if not isinstance(args[2], (list, tuple)) or torch.is_autocast_enabled("cpu"):
            return RECURRENT[kind](*args)
        first, hidden, weights, biases, layers, _, _, bidirectional, batch_first = args
        states = hidden if isinstance(hidden, (list, tuple)) else (hidden,)
        tensors = _cast((first, *states, *weights), first.device.type)
        options = (kind, len(states), biases, layers, bidirectional, batch_first)
        return _Layer.apply(options, *tensors)  # type: ignore[no-untyped-call]

    return function


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.options = options
        ctx.save_for_backward(*tensors)
        return tuple(_operations()[0](list(tensors), *options))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        run_backward = _operations()[1]
        return None, *run_backward(list(gradients), list(ctx.saved_tensors), *ctx.options)


def _cast(tensors: tuple[Tensor, ...], device: str) -> tuple[Tensor, ...]:
    """Cast the tensors as autocast does for cuDNN's layers."""
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor.to(dtype) for tensor in tensors)


@cache
def _operations() -> tuple[Any, Any]:
    """Define the operations: the layer, and the gradients of all its tensors.

    They have no kernel of their own for autograd, so that theirs may use it.
    """
    library = torch.library.Library("wholebatch", "FRAGMENT")
    library.define(f"recurrent(Tensor[] tensors, {_OPTIONS}) -> Tensor[]")
    library.define(
        f"recurrent_backward(Tensor[] gradients, Tensor[] tensors, {_OPTIONS}) -> Tensor[]"
    )
    library.impl("recurrent", _run, "CompositeExplicitAutograd")
    library.impl("recurrent_backward", _run_backward, "CompositeExplicitAutograd")
    torch.library.register_fake("wholebatch::recurrent", _shapes, lib=library)
    shapes = lambda gradients, tensors, *_: [one.new_empty(one.shape) for one in tensors]  # noqa: E731
    torch.library.register_fake("wholebatch::recurrent_backward", shapes, lib=library)
    _kept.append(library)
    ops = torch.ops.wholebatch
    return ops.recurrent.default, ops.recurrent_backward.default


_kept: list[torch.library.Library] = []
"""A library's operations go when it does."""


def _called(tensors: list[Tensor], options: tuple[Any, ...]) -> tuple[Tensor, ...]:
    kind, states, biases, layers, bidirectional, batch_first = options
    hidden, weights = tensors[1 : 1 + states], tensors[1 + states :]
    with warnings.catch_warnings():
        # Casts of the weights are not one piece of memory; cuDNN copies them, and says so.
        warnings.filterwarnings("ignore", message="RNN module weights are not part of")
        found = RECURRENT[kind](
            tensors[0],
            hidden if kind == "lstm" else hidden[0],
            weights,
            biases,
            layers,
            0.0,
            torch.is_grad_enabled(),
            bidirectional,
            batch_first,
        )
    return tuple(found)


def _run(tensors: list[Tensor], *options: Any) -> list[Tensor]:
    with torch.no_grad():
        return [result.contiguous() for result in _called(tensors, options)]


def _run_backward(gradients: list[Tensor], tensors: list[Tensor], *options: Any) -> list[Tensor]:
    # Compiled code runs with autograd's keys switched off.
    own = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    own = own.add(torch._C.DispatchKey.ADInplaceOrView)
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set() - own
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        results = _called(leaves, options)
        found = torch.autograd.grad(results, leaves, gradients)
    return [gradient.contiguous() for gradient in found]


def _shapes(tensors: list[Tensor], *options: Any) -> list[Tensor]:
    first, states = tensors[0], tensors[1 : 1 + options[1]]
    features = states[0].shape[-1] * (2 if options[4] else 1)
    output = first.new_empty(*first.shape[:-1], features)
    return [output, *(state.new_empty(state.shape) for state in states)]
