"""Randomness in the forward, found and switched off for a proof.

Dropout draws its masks for the batch that it is given, so the undivided batch and its micro-batches
get different ones, rightly: both are samples of the same thing. What can be proven is all the rest.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

__all__ = ["SILENCES", "dropouts"]


def dropouts(model: nn.Module) -> list[str]:
    """The modules that drop something now, by name."""
    return [name for name, module in model.named_modules() if _drops(module)]


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
    """Evaluation mode for all but the normalisations: functional dropout asks `self.training`."""
    for module in model.modules():
        if not isinstance(module, _BatchNorm | _InstanceNorm):
            module.training = False


SILENCES: tuple[Callable[[nn.Module], None], ...] = (_no_dropout, _evaluating)
"""Ways to switch randomness off, the gentlest first; each includes the ones before it."""
