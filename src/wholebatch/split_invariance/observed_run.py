"""Run `train` once, and observe what it returns and what torch's public hooks show of it.

The first forward shows the parameters before any update; the optimizers' steps show the gradients.
A gradient that `torch.nn.utils.clip_grad_norm_` clips is taken from before: clipping hides factors.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from wholebatch.errors import OptionError
from wholebatch.verification.watch_loop import Watch

Train: TypeAlias = Callable[[int], Any]
Tensors: TypeAlias = dict[str, Tensor]


class Run(NamedTuple):
    """One call of `train`."""

    micro_batch: int
    watches: bool = False
    """True to run it under `wb.watch`, which names mistakes."""


@dataclass
class Observed:
    """What one rank has shown in a run, on the host, by the names of parameters."""

    values: Tensors
    gradients: Tensors
    """Those of all steps of the optimizers, one after the other."""
    updates: Tensors
    dtype: torch.dtype
    """The least exact one of the values."""
    steps: int = 0
    clips: int = 0
    verdict: str = ""
    """The line of `wb.watch` about a wrong update; empty if it was not asked, or is right."""

    @property
    def judged(self) -> Tensors:
        """What splits are compared by: gradients where they are known."""
        return self.gradients or self.updates or self.values


class _Observer:
    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}  # parameters by id, so that no id is used again
        self.start: dict[int, Tensor] = {}
        self.gradients: dict[int, list[Tensor]] = {}
        self.before_clipping: dict[int, Tensor] = {}
        self.steps = self.clips = self.stepping = 0

    def keep(self, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            if id(parameter) not in self.start:
                self.kept[id(parameter)] = parameter
                self.start[id(parameter)] = parameter.detach().clone()

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
        self.steps += self.stepping == 0  # an optimizer may step another one
        self.stepping += 1
        self.keep(_parameters(optimizer))
        if not _has_closure(args, options):
            self._see(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
        self.stepping -= 1
        if _has_closure(args, options):  # which has made the last backward
            self._see(optimizer)

    def _see(self, optimizer: torch.optim.Optimizer) -> None:
        for p in _parameters(optimizer):
            if p.grad is not None:
                gradient = self.before_clipping.pop(id(p), p.grad).detach().clone()
                self.gradients.setdefault(id(p), []).append(gradient)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Install the hooks, and remove them."""

        def first_forward(module: nn.Module, inputs: Any) -> None:
            handle.remove()  # later forwards, and graphs of them, are not disturbed
            self.keep(list(module.parameters()))

        handle = register_module_forward_pre_hook(first_forward)
        with ExitStack() as stack:
            stack.callback(handle.remove)
            stack.callback(register_optimizer_step_pre_hook(self.before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self.after_step).remove)
            clip = self._observed_clip(torch.nn.utils.clip_grad_norm_)
            for home in (torch.nn.utils, torch.nn.utils.clip_grad):
                stack.enter_context(mock.patch.object(home, "clip_grad_norm_", clip))
            yield

    def _observed_clip(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        def observed(parameters: Any, *args: Any, **options: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            self.clips += 1
            for p in parameters:
                if p.grad is not None:
                    self.before_clipping[id(p)] = p.grad.detach().clone()
            return clip(parameters, *args, **options)

        return observed


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _has_closure(args: Any, options: Any) -> bool:
    return any(map(callable, (*args[1:], *options.values())))


def observe(train: Train, run: Run) -> Observed:
    """Return what `train(run.micro_batch)` shows; random generators start from the same seed."""
    observer = _Observer()
    with torch.random.fork_rng(devices=[]), observer.watching():
        torch.manual_seed(0)
        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        watch = Watch(name="train()", logs=False) if run.watches else None
        with watch or nullcontext():
            result = train(run.micro_batch)
    named = _named(result)
    dtypes = [t.dtype for t in named.values() if t.is_floating_point()] or [torch.float64]
    observed = Observed(
        values={name: _full(value) for name, value in named.items()},
        gradients={},
        updates={},
        dtype=max(dtypes, key=lambda dtype: torch.finfo(dtype).eps),
        steps=observer.steps,
        clips=observer.clips,
        verdict=watch.verdict.line if watch and not watch.verdict.same else "",
    )
    if isinstance(result, nn.Module):
        for name, p in named.items():
            gradients, start = observer.gradients.get(id(p), ()), observer.start.get(id(p))
            if gradients:
                observed.gradients[name] = torch.cat(
                    [_full(gradient).flatten() for gradient in gradients]
                )
            if start is not None and start.shape == p.shape:
                observed.updates[name] = observed.values[name] - _full(start)
    return observed


def _named(result: Any) -> dict[str, Tensor]:
    """Return the tensors of what `train` has returned, by name."""
    if isinstance(result, nn.Module):
        named: dict[str, Any] = dict(result.named_parameters())
    elif isinstance(result, Mapping):
        named = dict(result)
    elif isinstance(result, Sequence) and not isinstance(result, str):
        named = {str(place): value for place, value in enumerate(result)}
    else:
        named = {}
    named = {_plain(str(name)): value for name, value in named.items() if value is not None}
    try:
        named = {n: v if isinstance(v, Tensor) else torch.tensor(v) for n, v in named.items()}
    except (TypeError, ValueError, RuntimeError):
        named = {}
    if not named:
        raise OptionError(
            f"train() returned {type(result).__name__}: it must return the trained model, its "
            "gradients, or a dict of tensors or arrays by name"
        )
    return named


def _plain(name: str) -> str:
    """Return the name of a parameter without what torch.compile and DDP put before it."""
    return name.removeprefix("_orig_mod.").removeprefix("module.")


def _full(tensor: Tensor) -> Tensor:
    """Return a whole float64 copy on the host; all ranks call it for a DTensor."""
    tensor = tensor.detach()
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.to("cpu", torch.complex128 if whole.is_complex() else torch.float64, copy=True)
