"""Convolutions and matrix products of all micro-batches on one thread: the caller's.

PyTorch keeps cuDNN's execution plans, and the handles and workspaces of cuBLAS, per thread. Sixteen
threads would each search a plan for every convolution, in every window anew, and take sixteen
workspaces. So the threads of the micro-batches hand these operations to the caller's thread, which
waits for them to end anyhow, and whose plans are there already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Execute", "OneThread", "below_autograd", "executor"]

Execute = Callable[[Any, Any, Any], Any]
"""Runs an operation: `execute(func, args, kwargs)`."""

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
    """Runs what has a state per thread by `call`, which runs it elsewhere, and the rest here."""

    def execute(func: Any, args: Any, kwargs: Any) -> Any:
        if func in _PER_THREAD:
            return call(lambda: func(*args, **kwargs))
        return func(*args, **kwargs)

    return execute


class OneThread(TorchDispatchMode):
    """Sees every operation of one micro-batch, forward and backward, and has it executed."""

    def __init__(self, execute: Execute) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._execute = execute

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._execute(func, args, kwargs or {})


@contextmanager
def below_autograd() -> Iterator[None]:
    """The state that operations from below autograd and autocast are to be executed in."""
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch._C._AutoDispatchBelowAutograd())
        yield
