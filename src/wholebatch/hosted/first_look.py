"""The look before the first window in parts, for a host whose forward can be called."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from wholebatch.coupled.adds_up import AddsUp, Look
from wholebatch.hosted.ledger import Hosted
from wholebatch.loss import Loss

__all__ = ["FirstLook"]

_log = logging.getLogger("wholebatch")

_TRIES = 8
_MOST = 1000


class FirstLook:
    """Looks once whether the loss of a host's micro-batches adds up (`coupled.adds_up`).

    `host` is whose attributes a run may change beside the model's: numbers and small containers of
    them (a trainer's metrics) are put back.
    """

    def __init__(self, model: nn.Module, window: Hosted, *, host: object, off: str) -> None:
        self._model, self._window, self._host, self._off = model, window, host, off
        self._tries = _TRIES if window.may_look else 0

    @property
    def pending(self) -> bool:
        """True if the look is still to come."""
        return self._tries > 0 and not self._window.is_open

    def at(self, run: Callable[[Any], Loss], batch: Any, *, micro_batch: int | None = None) -> None:
        """Refuse a loss that does not add up, on the first samples of `batch`, on all ranks.

        Samples without units tell nothing; one process then looks at the next window's first.
        """
        ranks, made = self._window.ranks, Look()
        with _as_found(self._host):
            try:
                made = AddsUp(self._model).look(
                    run, batch, micro_batch=micro_batch, name="the loss"
                )
            except Exception as error:  # most often the loss's own, and the training will raise it
                _log.warning("no look whether micro-batches add up to the whole batch: %r", error)
        self._window.discard()  # what the runs have recorded of BatchNorm
        self._tries = self._tries - 1 if ranks.size == 1 and not made.told else 0
        made.refuse(self._off, elsewhere=bool(ranks.sum([float(len(made.findings))])[0]))


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
