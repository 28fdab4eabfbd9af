"""Pass 2: patterns over one window. All rules, in the order of their codes."""

from __future__ import annotations

from . import (
    clearing,
    clipping,
    learning_rate,
    loss_scale,
    mixed_samples,
    token_means,
    window_ends,
)
from .not_understood import not_understood
from .rule_base import Rule

__all__ = ["RULES", "Rule", "not_understood"]

_MODULES = (
    clearing, clipping, learning_rate, loss_scale, mixed_samples, token_means, window_ends,
)  # fmt: skip
_DEFINED = [value for module in _MODULES for value in vars(module).values()]
RULES: tuple[Rule, ...] = tuple(
    sorted((rule for rule in _DEFINED if isinstance(rule, Rule)), key=lambda rule: rule.code)
)
