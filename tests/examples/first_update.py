"""Record the first update of a training script, to compare it with that of the undivided batch."""

from __future__ import annotations

import copy
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from tests.support import distance, knows_grad_scale

FOLDER = Path(__file__).parents[2] / "examples"


class Stopped(Exception):
    """Ends a script from outside, as a kill would."""


@dataclass
class Update:
    """What one optimizer saw and made at its first step."""

    optimizer: type[torch.optim.Optimizer]
    group: dict[str, Any]
    before: list[Tensor]
    gradient: list[Tensor]
    after: list[Tensor]

    def errors(
        self, model: nn.Module, loss: Callable[[nn.Module], Tensor], clip_norm: float | None = None
    ) -> tuple[float, float]:
        """Return how far gradient and update are from those of `loss` on the undivided batch."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        with torch.no_grad():
            for parameter, value in zip(parameters, self.before, strict=True):
                parameter.copy_(value)
        optimizer = self.optimizer(parameters, lr=self.group["lr"])
        optimizer.param_groups[0].update(self.group)
        loss(model).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        gradient = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
        optimizer.step()
        moved = [p - old for p, old in zip(parameters, self.before, strict=True)]
        ours = [new - old for new, old in zip(self.after, self.before, strict=True)]
        return distance(self.gradient, gradient), distance(ours, moved)


@dataclass
class Run:
    """What a script did until it was stopped."""

    updates: list[Update]
    """One for each optimizer."""
    batches: list[Any]
    """What its loaders gave before the first update."""
    names: dict[str, Any]
    """The script's functions."""


@contextmanager
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def stopped_after(steps: int, recorded: list[Update] | None = None) -> Iterator[None]:
    """Raise Stopped in a script once its optimizers have made so many steps."""
    count = 0
    updates_of: dict[int, Update] = {}

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if recorded is None or id(optimizer) in updates_of:
            return
        group = {k: copy.copy(v) for k, v in optimizer.param_groups[0].items() if k != "params"}
        known = {k: v for k, v in group.items() if k in optimizer.defaults}
        parameters = [p for g in optimizer.param_groups for p in g["params"]]
        values = [p.detach().clone() for p in parameters]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
        updates_of[id(optimizer)] = Update(type(optimizer), known, values, grads, [])

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal count
        count += 1
        if recorded is not None and id(optimizer) in updates_of:
            update = updates_of[id(optimizer)]
            if not update.after:
                parameters = [p for g in optimizer.param_groups for p in g["params"]]
                update.after = [p.detach().clone() for p in parameters]
                recorded.append(update)
        if count >= steps:
            raise Stopped

    knows_grad_scale(before_step)
    knows_grad_scale(after_step)
    with ExitStack() as hooks:
        hooks.callback(register_optimizer_step_pre_hook(before_step).remove)
        hooks.callback(register_optimizer_step_post_hook(after_step).remove)
        with suppress(Stopped):
            yield


def run_script(name: str, *arguments: str) -> dict[str, Any]:
    """Run an example as `python examples/name.py arguments`; return its globals."""
    with mock.patch.object(sys, "argv", [f"{name}.py", *arguments]):
        return runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


def first_update(name: str, *arguments: str, optimizers: int = 1) -> Run:
    """Run an example in float64 until each of its optimizers has made one step."""
    run = Run([], [], {})
    give = DataLoader.__iter__

    def recorded(loader: Any) -> Iterator[Any]:
        for batch in give(loader):
            run.batches.append(copy.deepcopy(batch))
            yield batch

    with float64(), mock.patch.object(DataLoader, "__iter__", recorded):
        with stopped_after(optimizers, run.updates):
            run_script(name, *arguments)
        if name != "train_gan":  # it has no functions: all of it would run
            run.names = runpy.run_path(str(FOLDER / f"{name}.py"), run_name="read")
    return run


def joined(batches: Sequence[Any]) -> Any:
    """Return micro-batches as one batch, where all leaves have the same shape but for samples."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(list(batches))
    if isinstance(first, dict):
        return {key: joined([batch[key] for batch in batches]) for key in first}
    return [joined(parts) for parts in zip(*batches, strict=True)]
