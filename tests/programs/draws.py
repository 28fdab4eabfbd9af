"""Random values for the grammar, each program's independent of every other's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Strategy = Callable[[Random], Any]
"""A function that draws a value."""


def integers(least: int, most: int) -> Strategy:
    """Draw an integer of a range, both ends included."""
    return lambda random: random.randint(least, most)


def sampled_from(values: Sequence[Any]) -> Strategy:
    """Draw one of the values."""
    return lambda random: random.choice(values)


def booleans() -> Strategy:
    """Draw True or False."""
    return lambda random: random.random() < 0.5


def composite(function: Callable[..., Any]) -> Callable[..., Strategy]:
    """Make a strategy of a function whose first argument draws from other strategies."""

    @functools.wraps(function)
    def made(*args: Any, **options: Any) -> Strategy:
        return lambda random: function(lambda strategy: strategy(random), *args, **options)

    return made
