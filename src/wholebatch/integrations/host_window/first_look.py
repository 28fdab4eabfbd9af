"""The look before the first window in parts, for a host whose forward can be called."""

from __future__ import annotations

import copy
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from wholebatch.core.loss import Loss
from wholebatch.coupled.adds_up import AddsUp, Look
from wholebatch.coupled.local_collectives import local_collectives
from wholebatch.integrations.host_window.host_ledger import Hosted

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
        with _as_found(self._host), local_collectives():
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
    """Put back attributes of a host's own, and what small containers among them held."""
    attributes = vars(host)
    found: list[tuple[Any, Any]] = []
    _keep(attributes, found)
    try:
        yield
    finally:
        for container, before in found:
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(before)


def _keep(value: Any, found: list[tuple[Any, Any]]) -> None:
    """Note a small container and those in it, each with a copy of what it holds."""
    if type(value) not in (dict, defaultdict, list, set, deque) or len(value) > _MOST:
        return
    if any(value is container for container, _ in found):
        return
    found.append((value, copy.copy(value)))
    for one in value.values() if isinstance(value, dict) else value:
        _keep(one, found)
