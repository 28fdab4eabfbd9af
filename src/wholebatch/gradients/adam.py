"""The state that Adam and AdamW keep for a parameter, made before their first step would."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["state_of"]


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
