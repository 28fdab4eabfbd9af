"""Messages about how micro-steps execute: each is given once, with the reason."""

from __future__ import annotations

import logging
import warnings

__all__ = ["CannotTrace", "ExecuteWarning", "Notes", "first_line"]

_LOG = logging.getLogger("wholebatch.compile")


class ExecuteWarning(UserWarning):
    """The requested `execute` mode is not possible here; a slower one makes the same update."""


class CannotTrace(Exception):
    """A micro-step cannot be made into one graph. The message is the reason."""


class Notes:
    """Gives each message once: fallbacks from a requested mode as warnings, the rest in the log."""

    def __init__(self, *, asked: bool) -> None:
        self._asked = asked
        self._said: set[str] = set()
        self.history: list[str] = []

    def fell_back(self, from_: str, to: str, reason: str) -> None:
        """Warn that the mode named by `execute=` is not possible; under "auto", only log it."""
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
        """Log a message."""
        if text not in self._said:
            self._said.add(text)
            self.history.append(text)
            _LOG.info(text)


def first_line(problem: BaseException) -> str:
    """Return the first line of an exception's message, short enough to quote in another."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return lines[0][:200] if lines else "no message"
