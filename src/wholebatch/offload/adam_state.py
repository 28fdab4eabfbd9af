"""The state that Adam and AdamW keep for a parameter, and what their first moment goes by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from wholebatch.errors import UnsupportedError

__all__ = ["Owner", "check_adam", "owners_of", "state_of"]


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a parameter is, and what its first moment is multiplied with in a window."""

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    beta1: float
    sign: float

    @property
    def decay(self) -> float:
        """What the old moment counts in a sum of gradients: β₁ / (1 − β₁)."""
        return self.sign * self.beta1 / (1.0 - self.beta1)

    @property
    def share(self) -> float:
        """What the sum counts in the new moment."""
        return self.sign * (1.0 - self.beta1)

    def state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The parameter's state, which is there already."""
        state: dict[str, Any] = self.optimizer.state[parameter]
        return state


def check_adam(optimizer: torch.optim.Optimizer, option: str, what: str) -> None:
    """Refuse an optimizer whose moments are not Adam's; `what` gradients would do to them."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise UnsupportedError(
            f"{option} with {type(optimizer).__name__}: gradients can {what} the moments of "
            'torch\'s Adam and AdamW only; use one of these, or gradients="host"'
        )


def owners_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, Owner]:
    """By the parameter's id; one for all parameters of a group."""
    owners: dict[int, Owner] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            beta1 = float(group["betas"][0])
            if not 0.0 <= beta1 < 1.0:
                raise UnsupportedError(
                    f"betas={group['betas']}: gradients can be added up in Adam's first moment if "
                    "the first of its betas is at least 0 and below 1"
                )
            owner = Owner(optimizer, group, beta1, -1.0 if group["maximize"] else 1.0)
            owners.update((id(parameter), owner) for parameter in group["params"])
    return owners


def state_of(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter
) -> dict[str, Any]:
    """The parameter's state, made as Adam's own first step would make it where there is none."""
    state: dict[str, Any] = optimizer.state[parameter]
    if not state:
        on = parameter.device if group.get("fused") else torch.device("cpu")
        made = {"step": torch.zeros((), dtype=_step_dtype(group), device=on)}
        names = ["exp_avg", "exp_avg_sq"]
        for name in names + (["max_exp_avg_sq"] if group["amsgrad"] else []):
            made[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            made[name].requires_grad_(False)
        state.update(made)  # all or nothing: memory may have run out on the way
    return state


def _step_dtype(group: dict[str, Any]) -> torch.dtype:
    if group.get("fused"):
        return torch.float32
    return torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
