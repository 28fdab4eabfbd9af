"""What a new thread does not have of the thread that starts it, taken along."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

__all__ = ["Inherited"]

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Autocast:
    device: str
    dtype: torch.dtype
    enabled: bool


@dataclass(frozen=True, slots=True)
class Inherited:
    """The calling thread's PyTorch state, to run something under it in another thread."""

    context: contextvars.Context
    grad: bool
    inference: bool
    autocast: tuple[_Autocast, ...]
    autocast_cache: bool
    device: torch.device
    cuda_stream: torch.cuda.Stream | None
    modes: tuple[Any, ...]
    """What watches the operations of the caller, such as a meter of memory."""

    @classmethod
    def of_this_thread(cls) -> Inherited:
        kinds = ["cpu"]
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            kinds.append(accelerator.type)
        on_cuda = torch.cuda.is_initialized()
        return cls(
            context=contextvars.copy_context(),
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                _Autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
                for kind in kinds
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            device=torch.get_default_device(),
            cuda_stream=torch.cuda.current_stream() if on_cuda else None,
            modes=tuple(_get_current_dispatch_mode_stack()),
        )

    def run(self, function: Callable[[], R]) -> R:
        """What `function()` returns, called under this state.

        Backward runs on the thread that calls it, also on CUDA: only so can a micro-batch stop in
        the middle of its backward without stopping the others'.
        """
        return self.context.copy().run(self._run, function)

    def _run(self, function: Callable[[], R]) -> R:
        with ExitStack() as stack:
            if torch.get_default_device() != self.device:
                stack.enter_context(self.device)
            if self.cuda_stream is not None:
                stack.enter_context(torch.cuda.stream(self.cuda_stream))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            else:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            for cast in self.autocast:
                if cast.enabled != torch.is_autocast_enabled(cast.device):
                    stack.enter_context(
                        torch.autocast(
                            cast.device,
                            dtype=cast.dtype,
                            enabled=cast.enabled,
                            cache_enabled=self.autocast_cache,
                        )
                    )
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            for mode in self.modes:
                # Not entered: the mode is in use already, by the thread that waits for this one.
                _push_mode(mode)
                stack.callback(_pop_mode)
            return function()
