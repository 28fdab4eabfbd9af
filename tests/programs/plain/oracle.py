"""The truth: every window undivided, in float64.

A loop's own text runs in float64 too (its default dtype), and hooks on optimizers write down the
gradients before each step and the weights after it. Autocast leaves float64 alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tests.programs.plain.loop import Loop
from tests.programs.plain.pairs import undivided_pair
from tests.programs.plain.text import SCHEDULERS, imports, text_of

Steps = list[tuple[Tensor, Tensor]]
"""The gradients that each step has seen, and the weights after it."""

EXACT = 1e-9
"""The relative distance that rounding explains."""


def undivided(loop: Loop) -> Steps:
    """Return the steps of the undivided batches."""
    torch.set_default_dtype(torch.float64)
    scope: dict[str, Any] = {}
    text = text_of(loop)
    setup = text.setup().split("\n")
    exec(imports(loop) + "\n".join(line for line in setup if "dist." not in line), scope)
    if loop.ranks == 1:
        exec(text.dealt(), scope)
    windows = _of_all_ranks(loop, scope)
    if loop.task == "pair":
        with Recorder() as recorder:
            undivided_pair(loop, scope, windows)
        return recorder.steps
    model, optimizer = scope["model"], scope["optimizer"]
    model.train()
    steps: Steps = []
    for x, y in windows:
        scope.update(x=x, y=y)
        exec("\n".join(loop.of.forward), scope)
        mean = eval(loop.of.mean, scope) * float(eval(loop.weight or "1", scope))
        optimizer.zero_grad()
        mean.backward()
        _clip(loop, model)
        gradients = _gradients(optimizer)
        optimizer.step()
        steps.append((gradients, _weights(optimizer)))
        if loop.scheduler in SCHEDULERS:
            scope["scheduler"].step()
        elif loop.scheduler == "by hand":
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
    return steps


def _of_all_ranks(loop: Loop, scope: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Return the undivided batch of every window: that of all ranks."""
    if loop.ranks == 1:
        return _windows(loop, scope["loader"])
    dealt = "\n".join(text_of(loop).dealt().split("\n")[:-1])  # without the wrapper
    rows = []
    for rank in range(loop.ranks):
        own = {**scope, "rank": rank, "world": loop.ranks}
        exec(dealt, own)
        rows.append(_windows(loop, own["loader"]))
    return [
        (torch.cat([x for x, _ in row]), torch.cat([y for _, y in row]))
        for row in zip(*rows, strict=True)
    ]


def _windows(loop: Loop, loader: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the undivided batch of every window, in the order of the loop."""
    epochs = []
    for _ in range(loop.epochs):
        micros = [(m["x"], m["y"]) if isinstance(m, dict) else tuple(m) for m in loader]
        epochs.append(micros)
    if loop.shape == "split":
        return [window for micros in epochs for window in micros]
    if loop.shape in ("nested", "while"):  # windows go on over the end of an epoch
        epochs = [[micro for micros in epochs for micro in micros]]
        epochs[0] = epochs[0][: loop.windows * loop.epochs * loop.steps]
    windows = []
    for micros in epochs:
        for start in range(0, len(micros), loop.steps):
            xs, ys = zip(*micros[start : start + loop.steps], strict=True)
            windows.append((torch.cat(xs), torch.cat(ys)))
    return windows


def _clip(loop: Loop, model: nn.Module) -> None:
    if loop.clip == "norm":
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    if loop.clip == "value":
        nn.utils.clip_grad_value_(model.parameters(), 0.005)


def _gradients(optimizer: torch.optim.Optimizer) -> Tensor:
    every = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    rows = [torch.zeros_like(p) if p.grad is None else p.grad for p in every]
    return torch.cat([row.detach().double().flatten() for row in rows])


def _weights(optimizer: torch.optim.Optimizer) -> Tensor:
    every = [p for group in optimizer.param_groups for p in group["params"]]
    return torch.cat([p.detach().double().flatten() for p in every])


class Recorder:
    """Writes down what every optimizer step sees and makes."""

    def __init__(self) -> None:
        self.steps: Steps = []
        self._gradients = torch.empty(0)

    def __enter__(self) -> Recorder:
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._gradients = _gradients(optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.steps.append((self._gradients, _weights(optimizer)))


def difference(right: Steps, steps: Steps) -> str:
    """Return the first difference in words; empty if rounding explains all."""
    for number, (expected, actual) in enumerate(zip(right, steps, strict=False)):
        for name, wanted, got in zip(("gradient", "weights"), expected, actual, strict=True):
            distance = float((got - wanted).norm() / wanted.norm().clamp(min=1e-12))
            if not distance <= EXACT:
                return f"the {name} of window {number} is {distance:.1e} off"
    if len(right) != len(steps):
        return f"{len(steps)} steps instead of {len(right)}"
    return ""
