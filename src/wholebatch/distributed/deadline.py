"""How long a rank may make no progress before all of them end, as a user writes it."""

from __future__ import annotations

import math

from wholebatch.errors import OptionError

__all__ = ["DEADLINE", "parse_deadline"]

DEADLINE = "WHOLEBATCH_DEADLINE"
"""The environment variable that says it: seconds, "off", or "auto"."""


def parse_deadline(text: str, label: str = DEADLINE) -> float | None:
    """Return the seconds that a user wrote: None for "auto", infinity for "off".

    >>> parse_deadline("90"), parse_deadline("auto"), parse_deadline("off")
    (90.0, None, inf)
    """
    if text in ("auto", "off"):
        return None if text == "auto" else math.inf
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise OptionError(f'{label} {text}: must be seconds above 0, "auto" or "off"')
    return seconds
