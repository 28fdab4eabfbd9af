"""All rules, in the order of their codes: `check` of every `wbNNN_name` here."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from .loop_not_understood import not_understood
from .rule_base import Rule

__all__ = ["RULES", "Rule", "not_understood"]

RULES: tuple[Rule, ...] = tuple(
    import_module(f".{module.name}", __name__).check
    for module in sorted(iter_modules(__path__), key=lambda module: module.name)
    if module.name.startswith("wb")
)
