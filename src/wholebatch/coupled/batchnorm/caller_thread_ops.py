"""Convolutions and matrix products of all micro-batches, run on the caller's thread.

PyTorch keeps cuDNN's execution plans, and the handles and workspaces of cuBLAS, per thread. Sixteen
threads would allocate sixteen workspaces, and each would search a plan for every convolution again
in every window. So the micro-batches' threads hand these operations to the caller's thread. It is
waiting for them anyway, and it already has the plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Execute", "OneThread", "below_autograd", "executor"]

Execute = Callable[[Any, Any, Any], Any]
"""A function that runs an operation: `execute(func, args, kwargs)`."""

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


def executor(call: Callable[[Callable[[], Any]], Any]) -> Execute:
    """Return an `Execute` that runs operations with per-thread state through `call`."""

    def execute(func: Any, args: Any, kwargs: Any) -> Any:
        if func in _PER_THREAD:
            return call(lambda: func(*args, **kwargs))
        return func(*args, **kwargs)

    return execute


class OneThread(TorchDispatchMode):
    """A dispatch mode that passes every operation of one micro-batch to `execute`."""

    def __init__(self, execute: Execute) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._execute = execute

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._execute(func, args, kwargs or {})


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
