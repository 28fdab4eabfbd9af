"""Random numbers held: rows of a batch that run alone are given what they drew in the batch.

Dropout, noise, time steps and the like make the loss of a batch random, and so not the sum of the
losses of its halves. While the batch runs, every tensor that torch draws is recorded; while some of
its rows run alone, each draw is given the numbers that those rows had.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HeldDraws"]

_DROPOUTS = ("aten::native_dropout", "aten::_fused_dropout")
_DRAWS_BY_INPUT = ("aten::rrelu_with_noise", "aten::rrelu_with_noise_", "aten::randperm")
_CHANCES = ("dropout_p", "dropout", "p")


class HeldDraws(TorchDispatchMode):
    """Records what torch draws, and gives it again to some of the rows.

    The k-th draw of a part is given the k-th draw of the whole: its own rows of it, along the one
    dimension that is smaller in proportion, or all of it where the shapes are the same. `failed`
    says what could not be held, if anything: a fused kernel that draws by itself, another number
    of draws, a shape that does not fit.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.failed: str | None = None
        self._doubtful = False
        self._drawn: list[Tensor] = []
        self._names: list[str] = []
        self._part: tuple[int, int, int] | None = None
        self._next = 0
        self._is_draw: dict[Any, bool] = {}

    @property
    def held(self) -> bool:
        """True if every draw of the parts so far was given the numbers of its rows.

        A draw that was cut along a dimension that holds more than the samples is doubtful.
        """
        return self.failed is None and not self._doubtful

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the draws of the whole."""
        self.failed, self._doubtful = None, False
        self._drawn, self._names, self._part = [], [], None
        with self:
            yield

    @contextmanager
    def serving(self, start: int, stop: int, of: int, *, to_the_end: bool = True) -> Iterator[None]:
        """Give the rows `start` to `stop` of the whole (`of` rows) what they drew in it."""
        self._part, self._next = (start, stop, of), 0
        with self:
            yield
        if to_the_end and self._next != len(self._drawn):
            self._fail(f"{self._next} draws instead of {len(self._drawn)}")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        is_draw = self._is_draw.get(func)
        if is_draw is None:
            is_draw = self._is_draw[func] = torch.Tag.nondeterministic_seeded in func.tags
        if not is_draw or _draws_nothing(func, args, given):
            return func(*args, **given)
        made = func(*args, **given)
        if func._schema.name in _DROPOUTS:
            return self._dropout(func, args, made)
        if not isinstance(made, Tensor):
            self._fail(func._schema.name)
            return made
        self._hold(func._schema.name, made)
        return made

    def _dropout(self, func: Any, args: Sequence[Any], made: tuple[Tensor, Tensor]) -> Any:
        """The mask is what was drawn; the output follows from it."""
        out, mask = made
        if self._hold(func._schema.name, mask) and args[1] < 1:
            kept = args[1] if func._schema.name == "aten::_fused_dropout" else 1.0 - args[1]
            out = args[0] * mask.to(args[0].dtype) * (1.0 / kept)
        return out, mask

    def _hold(self, name: str, made: Tensor) -> bool:
        """Record a draw, or put the recorded numbers into it; True if it was changed."""
        if self._part is None:
            self._drawn.append(made.detach().clone())
            self._names.append(name)
            return False
        place, self._next = self._next, self._next + 1
        if place >= len(self._drawn) or self._names[place] != name:
            self._fail(f"{name} is drawn at another place")
            return False
        rows = self._rows_of(self._drawn[place], made.shape)
        if rows is None or (name in _DRAWS_BY_INPUT and rows.shape != self._drawn[place].shape):
            self._fail(f"{name} of shape {tuple(made.shape)}")
            return False
        made.copy_(rows)
        return True

    def _rows_of(self, whole: Tensor, shape: Sequence[int]) -> Tensor | None:
        if whole.shape == tuple(shape):
            return whole
        assert self._part is not None
        start, stop, of = self._part
        if whole.dim() != len(shape):
            return None
        differing = [d for d in range(whole.dim()) if whole.shape[d] != shape[d]]
        if len(differing) != 1:
            return None
        dim, size = differing[0], whole.shape[differing[0]]
        if size % of or size // of * (stop - start) != shape[dim]:
            return None
        self._doubtful = self._doubtful or size != of
        return whole.narrow(dim, size // of * start, shape[dim])

    def _fail(self, why: str) -> None:
        self.failed = self.failed or why


def _draws_nothing(func: Any, args: Sequence[Any], given: dict[str, Any]) -> bool:
    """True for a fused kernel whose dropout is off."""
    if not ("attention" in func._schema.name or "rnn" in func._schema.name):
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in _CHANCES and str(argument.type) == "float":
            default = argument.default_value if argument.has_default_value() else 0.0
            value = args[place] if place < len(args) else given.get(argument.name, default)
            return math.isclose(float(value or 0.0), 0.0)
    return False
