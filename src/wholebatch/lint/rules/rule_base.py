"""The rule: data and a check of the model. Its page is the docstring of its module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..findings import Report
from ..model import File

__all__ = ["Check", "Rule"]

Check = Callable[[File], Iterator[Report]]


@dataclass(frozen=True)
class Rule:
    """One rule: its code, a short name, its level, and its check."""

    code: str
    name: str
    summary: str
    check: Check
    level: str = "warning"
    fixable: bool = False

    @property
    def page(self) -> str:
        """Return the rule's page in Markdown.

        It says what the rule does, why it matters, its known problems, an example, and what to use
        instead.
        """
        module = inspect.getmodule(self.check)
        body = inspect.cleandoc(module.__doc__ or "") if module is not None else ""
        grade = "note" if self.level == "note" else "warning"
        fix = "`--fix` repairs the certain cases." if self.fixable else "No automatic fix."
        return f"# {self.code}: {self.name}\n\n*{grade} · {fix}*\n\n{body}\n"
