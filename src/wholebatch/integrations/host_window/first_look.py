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
from wholebatch.core.splitting.samples import readable_layout
from wholebatch.coupled.adds_up import LookResult, check_adds_up
from wholebatch.coupled.local_collectives import local_collectives
from wholebatch.integrations.host_window.host_ledger import HostLedger

__all__ = ["FirstLook", "replaced_attributes"]

_log = logging.getLogger("wholebatch")

_MOST_TRIES = 8
_LARGEST_CONTAINER = 1000


class FirstLook:
    """Looks once whether the loss of a host's micro-batches adds up (`coupled.adds_up`).

    A run of the loss may change attributes of `host`, beside the model's. Numbers among them, and
    small containers (a trainer's metrics), are put back.
    """

    def __init__(self, model: nn.Module, window: HostLedger, *, host: object, off: str) -> None:
        self._model, self._window, self._host, self._off = model, window, host, off
        self._tries = _MOST_TRIES if window.may_look else 0

    @property
    def pending(self) -> bool:
        """True if the look is still to come."""
        return self._tries > 0 and not self._window.is_open

    def at(self, run: Callable[[Any], Loss], batch: Any, *, micro_batch: int | None = None) -> None:
        """Refuse a loss that does not add up, on the first samples of `batch`, on all ranks.

        Samples without units tell nothing; one process then looks at the next window's first.
        """
        group, made = self._window.group, LookResult()
        with _attributes_restored(self._host), local_collectives():
            try:
                layout = readable_layout(batch, None, ())
                made = check_adds_up(
                    self._model, run, layout, micro_batch=micro_batch, name="the loss"
                )
            except Exception as error:  # most often the loss's own, and the training will raise it
                _log.warning("no look whether micro-batches add up to the whole batch: %r", error)
        self._window.discard()  # what BatchNorm policies have recorded of the runs
        self._tries = self._tries - 1 if group.ranks == 1 and not made.conclusive else 0
        made.refuse(self._off, on_another_rank=bool(group.sum([float(len(made.findings))])[0]))


@contextmanager
def _attributes_restored(host: object) -> Iterator[None]:
    """Put back the attributes of an object, and the contents of small containers among them."""
    found: list[tuple[Any, Any]] = []
    _copy_containers(vars(host), found)
    try:
        yield
    finally:
        for container, before in found:
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(before)


def _copy_containers(value: Any, found: list[tuple[Any, Any]]) -> None:
    """Append a small container, and those inside it, each with a copy."""
    if type(value) not in (dict, defaultdict, list, set, deque) or len(value) > _LARGEST_CONTAINER:
        return
    if any(value is container for container, _ in found):
        return
    found.append((value, copy.copy(value)))
    for one in value.values() if isinstance(value, dict) else value:
        _copy_containers(one, found)


@contextmanager
def replaced_attributes(owner: object, **attributes: Any) -> Iterator[None]:
    """Set attributes of this one object within the context; then restore those that it had."""
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            own.pop(name, None)
        own.update(before)
