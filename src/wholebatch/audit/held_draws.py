"""Random numbers of a batch, given again to parts of its samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_DROPOUTS = ("aten::native_dropout", "aten::_fused_dropout")
_DRAWS_BY_INPUT = ("aten::rrelu_with_noise", "aten::rrelu_with_noise_", "aten::randperm")


def _fused_dropout(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> float | None:
    """Return the dropout of a kernel that draws its masks by itself; None for other operations."""
    if not any(kernel in func.name() for kernel in ("attention", "rnn")):
        return None
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout", "p") and str(argument.type) == "float":
            default = argument.default_value if argument.has_default_value() else 0.0
            value = args[place] if place < len(args) else kwargs.get(argument.name, default)
            return float(value or 0.0)
    return None


class _DispatchMode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes seconds


class HeldDraws(_DispatchMode):
    """Gives every sample what torch drew for the first one, in all runs of some samples.

    Dropout and noise make the loss of a batch random, and so not the sum of those of its halves.
    The k-th draw of every run is the first row of the k-th draw of the whole, for all rows.

    `held` is False after a draw that could not be given so: of a fused kernel that draws by itself,
    of a permutation, or of another number or shape of rows.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = True
        self._rows: list[tuple[str, Tensor]] = []
        self._records = True
        self._next = 0
        self._is_draw: dict[int, bool] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the draws of the whole."""
        self.held, self._rows, self._records = True, [], True
        with self:
            yield

    @contextmanager
    def serving(self, *, to_the_end: bool = True) -> Iterator[None]:
        """Give a part of the whole what was drawn in it."""
        self._records, self._next = False, 0
        with self:
            yield
        if to_the_end and self._next != len(self._rows):
            self.held = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Called for every operation: by identity, since an operation's own hash is Python code.
        is_draw = self._is_draw.get(id(func))
        if is_draw is None:
            is_draw = self._is_draw[id(func)] = torch.Tag.nondeterministic_seeded in func.tags
        drawn = func(*args, **(kwargs or {}))
        if not is_draw or _fused_dropout(func, args, kwargs or {}) == 0.0:
            return drawn
        name = func.name().partition(".")[0]
        if name in _DROPOUTS:  # The mask is what was drawn; the output follows from it.
            out, mask = drawn
            if self._hold(name, mask) and args[1] < 1:
                kept = args[1] if name == "aten::_fused_dropout" else 1.0 - args[1]
                out = args[0] * mask.to(args[0].dtype) * (1.0 / kept)
            return out, mask
        if name in _DRAWS_BY_INPUT or not isinstance(drawn, Tensor):
            self.held = False
        else:
            self._hold(name, drawn)
        return drawn

    def _hold(self, name: str, drawn: Tensor) -> bool:
        """Put one row into all of a draw; return False if this is another draw than recorded."""
        row = drawn[:1] if drawn.dim() else drawn
        if self._records:
            self._rows.append((name, row.detach().clone()))
            self._next = len(self._rows) - 1
        place, self._next = self._next, self._next + 1
        known = place < len(self._rows) and self._rows[place][0] == name
        if not known or self._rows[place][1].shape != row.shape:
            self.held = False
            return False
        drawn.copy_(self._rows[place][1].expand_as(drawn))
        return True
