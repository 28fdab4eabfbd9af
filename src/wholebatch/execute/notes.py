"""What a run is told about how its micro-steps execute: once each, with the reason."""

from __future__ import annotations

import logging
import warnings

__all__ = ["CannotTrace", "ExecuteWarning", "Notes", "first_line"]

_LOG = logging.getLogger("wholebatch.execute")


class ExecuteWarning(UserWarning):
    """The chosen way to execute is not possible here; a slower one makes the same update."""


class CannotTrace(Exception):
    """A micro-step that cannot be made into one graph. The message is the reason."""


class Notes:
    """Says everything once: fallbacks that were not asked for as warnings, the rest in the log."""

    def __init__(self, *, asked: bool) -> None:
        self._asked = asked
        self._said: set[str] = set()
        self.history: list[str] = []

    def fell_back(self, from_: str, to: str, reason: str) -> None:
        """`execute=` named a mode that cannot be had: a warning. Under "auto": only a note."""
        text = f"execute={from_!r} is not possible here: {reason}. Micro-steps run {to} instead"
        if text in self._said:
            return
        self._said.add(text)
        self.history.append(text)
        if self._asked:
            warnings.warn(text, ExecuteWarning, stacklevel=2)
        else:
            _LOG.info(text)

    def tell(self, text: str) -> None:
        """A note for the log."""
        if text not in self._said:
            self._said.add(text)
            self.history.append(text)
            _LOG.info(text)


def first_line(problem: BaseException) -> str:
    """The first line of an exception's message, short enough to be part of another."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return lines[0][:200] if lines else "no message"
