"""The PyTorch state of a thread, for threads that it starts: they do not inherit it."""

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
    """The calling thread's PyTorch state, under which another thread can run a function."""

    context: contextvars.Context
    grad: bool
    inference: bool
    autocast: tuple[_Autocast, ...]
    autocast_cache: bool
    device: torch.device
    cuda_stream: torch.cuda.Stream | None
    modes: tuple[Any, ...]
    """The dispatch modes of the caller, such as a memory meter."""

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
        """Run `function()` under this state and return its result.

        Backward runs on the thread that calls it, also on CUDA. Only then can a micro-batch pause
        in the middle of its backward without blocking the others.
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
                # Push the mode without entering it: the waiting thread has entered it already.
                _push_mode(mode)
                stack.callback(_pop_mode)
            return function()
