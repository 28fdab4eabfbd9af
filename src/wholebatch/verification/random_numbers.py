"""Random numbers in the forward: switch dropout off, and name other draws.

Dropout draws its masks for the batch it gets, so the undivided batch and its micro-batches get
different ones. Both are right: they are samples of the same distribution. It is switched off for a
proof. Other draws of a loss cannot be switched off: the lines that draw are named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._python_dispatch import TorchDispatchMode

from wholebatch.verification.findings import listed
from wholebatch.verification.loop_calls import user_line
from wholebatch.verification.model_runs import ModelRuns


class DrawnLines(TorchDispatchMode):
    """Notes `operation (file:line)` of every draw that is made within it, in their order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.lines[f"{func.overloadpacket.__name__} ({user_line() or 'torch'})"] = None
        return func(*args, **(kwargs or {}))

    def __str__(self) -> str:
        lines = list(self.lines)
        return ", ".join(lines[:3]) + (f" and {len(lines) - 3} more" if lines[3:] else "")


def _drops(module: nn.Module) -> bool:
    if not module.training:
        return False
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return float(module.dropout) > 0
    return False


def _no_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.training = False
            module.p = 0.0  # a loop may call model.train() again
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0


def _evaluating(model: nn.Module) -> None:
    """Set evaluation mode but for normalisations: functional dropout asks `self.training`."""
    for module in model.modules():
        if not isinstance(module, _BatchNorm | _InstanceNorm):
            module.training = False


_SILENCES: tuple[Callable[[nn.Module], None], ...] = (_no_dropout, _evaluating)
"""Ways to switch randomness off, the gentlest first; each includes the ones before it."""


def silenced(runs: ModelRuns, batch: Any) -> tuple[str, str]:
    """Switch randomness off as gently as it goes; return a note, and what draws all the same."""
    if not runs.draws_random_numbers(batch):
        return "", ""
    names = [name for name, module in runs.model.named_modules() if _drops(module)]
    where = f"dropout in {listed(names)}" if names else "functional dropout"
    for silence in _SILENCES:
        runs.silences.append(silence)
        if not runs.draws_random_numbers(batch):
            depends = "its masks depend on the split, which is not a mistake"
            return f"{where} is off in this proof: {depends}", ""
    runs.silences.clear()
    with DrawnLines() as lines:
        runs.draws_random_numbers(batch)
    places = f" ({lines})" if lines.lines else ""
    return "", f"the loss or the model's forward draws random numbers{places}"
