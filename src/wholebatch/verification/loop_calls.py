"""The calls of torch that a loop makes: data that flows between its micro-batches, and averages.

An output of one micro-batch is marked, and what is computed of it inherits the mark. Where a later
micro-batch computes its loss with a marked number, that micro-batch depends on the earlier one,
whatever held the number: a variable, a list, a module's attribute or a buffer.
"""

from __future__ import annotations

import sys
import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from wholebatch.window.autograd_graph import graph_nodes

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_MARK, _WEIGHT = "_wholebatch_micro_batch", "_wholebatch_weight"
"""Attributes of tensors: the micro-batch they come from, and the weight that they show."""
_ALIAS = "_wholebatch_alias"
"""The tensor whose numbers they share."""


def user_line() -> str:
    """Return the innermost line that is neither torch's nor ours, as file:line."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        name = frame.f_code.co_filename
        if not name.startswith((*_OURS, "<")):
            return f"{Path(name).name}:{line}"
    return ""


class LoopCalls(TorchFunctionMode):
    """Marks the outputs of micro-batches; `number` is that of the micro-batch now."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.trained: set[int] = set()
        """The ids of the trained weights."""
        self.loss_line = ""
        """The line of the last reduction."""
        self.written: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}
        """Tensors that were written with a weight of their shape, and that weight."""
        self.is_paused = self._is_entered = False
        self._flows: list[tuple[Any, int]] = []
        """Nodes that have used a number of an earlier micro-batch, and which."""

    def begin(self) -> None:
        if not self._is_entered:
            self.__enter__()  # type: ignore[no-untyped-call]
            self._is_entered = True

    def end(self) -> bool:
        """Leave the mode, if it is the innermost one; True if it is left."""
        if self._is_entered and _get_current_function_mode() is self:
            self.__exit__(None, None, None)
            self._is_entered = False
        return not self._is_entered

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing in this block."""
        was, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = was

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_paused:
            return result
        given = list(_tensors(args if not kwargs else (*args, *kwargs.values())))
        name = getattr(func, "__name__", "")
        if name.startswith("_foreach") and name.endswith("_"):
            rows = [arg for arg in args if isinstance(arg, tuple | list)]
            for row in zip(*rows, strict=False):
                self._note(row[0], list(_tensors(row)))
        elif name == "__setitem__":
            self._note(given[0], given)
        else:
            for made in _tensors((result,)):
                self._note(made, given)
            if name in ("detach", "__get__") and given and isinstance(result, Tensor):
                setattr(result, _ALIAS, getattr(given[0], _ALIAS, given[0]))
        return result

    def _note(self, made: Tensor, given: Sequence[Tensor]) -> None:
        node = made.grad_fn
        if node is not None:
            for tensor in given:
                mark = getattr(tensor, _MARK, self.number)
                if mark < self.number and not tensor.requires_grad:
                    self._flows.append((node, mark))
            if not made.dim() and any(tensor.dim() for tensor in given):
                self.loss_line = user_line()
            setattr(made, _MARK, self.number)
            return
        marks = [getattr(tensor, _MARK, -1) for tensor in given]
        if marks and max(marks) >= 0 and not isinstance(made, nn.Parameter):
            setattr(made, _MARK, max(marks))
        for tensor in given:
            weight = getattr(tensor, _WEIGHT, None)
            shown = tensor if id(tensor) in self.trained else weight() if weight else None
            if shown is not None and shown.shape == made.shape and id(made) not in self.trained:
                if any(made is other for other in given):
                    owner = getattr(made, _ALIAS, made)
                    if id(owner) not in self.trained:
                        self.written[id(owner)] = (weakref.ref(owner), weakref.ref(shown))
                elif not hasattr(made, _WEIGHT):
                    setattr(made, _WEIGHT, weakref.ref(shown))

    def carried_into(self, nodes: Sequence[Any]) -> tuple[int, ...]:
        """Return the earlier micro-batches whose outputs these graphs use; forget the flows."""
        flows, self._flows = self._flows, []
        if not flows:
            return ()
        graph = set(graph_nodes(nodes))
        return tuple(sorted({mark for node, mark in flows if node in graph}))


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from (inner for inner in value if isinstance(inner, Tensor))
