"""All rules, in the order of their codes."""

from __future__ import annotations

from . import (
    wb101,
    wb102,
    wb103,
    wb104,
    wb105,
    wb106,
    wb107,
    wb108,
    wb109,
    wb110,
    wb111,
    wb112,
    wb113,
    wb114,
    wb115,
    wb116,
    wb117,
    wb118,
)
from .base import Rule

__all__ = ["RULES", "Rule", "rule"]

RULES: tuple[Rule, ...] = (
    wb101.RULE,
    wb102.RULE,
    wb103.RULE,
    wb104.RULE,
    wb105.RULE,
    wb106.RULE,
    wb107.RULE,
    wb108.RULE,
    wb109.RULE,
    wb110.RULE,
    wb111.RULE,
    wb112.RULE,
    wb113.RULE,
    wb114.RULE,
    wb115.RULE,
    wb116.RULE,
    wb117.RULE,
    wb118.RULE,
)


def rule(code: str) -> Rule | None:
    """Return the rule with this code, or None."""
    return next((r for r in RULES if r.code == code.upper()), None)
