"""A rule is data and a question asked of the model; its page is the docstring of its module."""

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
    """One rule: its code, a name of a few words, how grave it is, and the question."""

    code: str
    name: str
    summary: str
    check: Check
    level: str = "warning"
    fixable: bool = False

    @property
    def page(self) -> str:
        """The rule's page in Markdown: what, why it is bad, known problems, example, instead."""
        module = inspect.getmodule(self.check)
        body = inspect.cleandoc(module.__doc__ or "") if module is not None else ""
        grade = "note" if self.level == "note" else "warning"
        fix = "`--fix` repairs the certain cases." if self.fixable else "No automatic fix."
        return f"# {self.code}: {self.name}\n\n*{grade} · {fix}*\n\n{body}\n"
