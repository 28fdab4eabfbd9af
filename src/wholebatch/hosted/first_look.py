"""The look before the first window in parts, for a host whose forward can be called."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from wholebatch.coupled.guard import Guard
from wholebatch.hosted.ledger import Hosted
from wholebatch.loss import Loss

__all__ = ["FirstLook"]

_MOST = 1000


class FirstLook:
    """Looks once whether the loss of a host's micro-batches adds up (`coupled.guard`).

    `host` is whose attributes a run may change beside the model's: numbers and small containers of
    them (a trainer's metrics) are put back.
    """

    def __init__(self, model: nn.Module, window: Hosted, *, host: object, off: str) -> None:
        self._window = window
        self._host = host
        self._guard = Guard(model, looks=window.may_look, off=off)

    @property
    def pending(self) -> bool:
        """True if the look is still to come."""
        return self._guard.pending and not self._window.is_open

    def at(self, run: Callable[[Any], Loss], batch: Any, *, micro_batch: int | None = None) -> None:
        """Refuse a loss that does not add up, on the first samples of `batch`."""
        ranks = self._window.ranks
        with _as_found(self._host):
            self._guard.look(
                run,
                batch,
                micro_batch=micro_batch,
                name="the loss",
                summed=lambda number: ranks.sum([number])[0],
                alone=ranks.size == 1,
            )
        self._window.discard()  # what the runs have recorded of BatchNorm


@contextmanager
def _as_found(host: object) -> Iterator[None]:
    """Put back numbers and small containers of a host's own."""
    before = {name: _copied(value) for name, value in vars(host).items()}
    try:
        yield
    finally:
        now = vars(host)
        for name in [name for name in now if name not in before]:
            del now[name]
        now.update(before)


def _copied(value: Any) -> Any:
    """Return a copy of a small container, level by level; anything else is itself."""
    kind = type(value)
    if kind not in (dict, defaultdict, list, set, deque) or len(value) > _MOST:
        return value
    if kind in (dict, defaultdict):
        made = {key: _copied(one) for key, one in value.items()}
        return defaultdict(value.default_factory, made) if kind is defaultdict else made
    if kind is deque:
        return deque(map(_copied, value), value.maxlen)
    return [*map(_copied, value)] if kind is list else set(value)
