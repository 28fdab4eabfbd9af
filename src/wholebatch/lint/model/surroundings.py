"""The code that a loop is a part of: its function, what that names, its class, and the module's."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

from .expressions import keyword, last_part, names_in, number
from .file_facts import Facts

_T = TypeVar("_T")


class Surroundings:
    """The code around the loops of one walk. A function that nothing leads to is no part of it."""

    def __init__(self, root: ast.AST, facts: Facts) -> None:
        owner = facts.class_around(getattr(root, "lineno", 0))
        starts = [root, facts.module, *([owner] if owner is not None else [])]
        self.parts = list({id(n): n for start in starts for n in facts.reached(start)}.values())
        self._answers: dict[Callable[[Surroundings], Any], Any] = {}

    def ask(self, question: Callable[[Surroundings], _T]) -> _T:
        """Return the answer to a question about this code, which is worked out once."""
        if question not in self._answers:
            self._answers[question] = question(self)
        answer: _T = self._answers[question]
        return answer

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Return every node of the code."""
        return list({id(n): n for part in self.parts for n in ast.walk(part)}.values())

    @cached_property
    def words(self) -> frozenset[str]:
        """Return the names in the code."""
        return names_in(*self.parts)

    @cached_property
    def calls(self) -> dict[str, list[ast.Call]]:
        """Return the calls of the code by their last name."""
        calls: dict[str, list[ast.Call]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Call):
                calls.setdefault(last_part(node.func), []).append(node)
        return calls

    @cached_property
    def accelerator(self) -> ast.Call | None:
        """Return the call that creates the Accelerator, if it is here."""
        calls = self.calls.get("Accelerator", [])
        # Several branches may create one: take that which is given the number of steps.
        with_steps = [c for c in calls if keyword(c, "gradient_accumulation_steps") is not None]
        return next(iter((*with_steps, *calls)), None)

    @cached_property
    def accelerator_divides(self) -> bool | None:
        """True if Accelerate divides the loss, False if not, None if this code does not show it."""
        call = self.accelerator
        if call is None:
            return None
        steps = keyword(call, "gradient_accumulation_steps")
        if steps is not None:
            return number(steps) != 1
        if keyword(call, "gradient_accumulation_plugin") is not None:
            return True
        unknown = keyword(call, "deepspeed_plugin") is not None
        return None if unknown or any(k.arg is None for k in call.keywords) else False

    @cached_property
    def engine_steps(self) -> list[ast.expr]:
        """Return what configurations of engines here set as their number of micro-batches."""
        values: list[ast.expr] = []
        for node in self.nodes:
            if isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                values += [value for key, value in pairs if _is_steps_key(key)]
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
                values += [node.value] if _is_steps_key(node.targets[0].slice) else []
        return values


def _is_steps_key(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and key.value == "gradient_accumulation_steps"
