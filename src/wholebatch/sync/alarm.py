"""A rank that fails tells the others, so that none of them waits in a collective for ever.

The failing rank posts its message in the job's store. A thread in every rank looks there once a
second; what waits in one of our own collectives raises the message at once, and a rank that is
stuck inside an engine's collective is ended with it after a grace period.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any

import torch.distributed as dist

from wholebatch.errors import RankError

__all__ = ["Alarm", "alarm"]

_KEY = "wholebatch/failed"
_LOOK_EVERY = 1.0
_GRACE = 10.0
_LAST_TURN = 0.1


class Alarm:
    """Posts this rank's failure, and watches for the others'."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._message: str | None = None
        self._posted = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="wholebatch-alarm", daemon=True)
        self._thread.start()
        atexit.register(self._end)
        self._previous_hook = sys.excepthook
        sys.excepthook = self._excepthook

    def post(self, error: BaseException) -> None:
        """Tell all ranks that this one has failed; the first message stands."""
        if self._posted or isinstance(error, RankError):
            return
        if self._message is not None:  # this failure is only the consequence of another
            sys.stderr.write(f"wholebatch: before this, another rank failed: {self._message}\n")
            return
        self._posted = True
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        with contextlib.suppress(Exception):  # the store's own host is gone: they will notice
            self._store.compare_set(_KEY, "", f"rank {self._rank}: {text}")

    def check(self) -> None:
        """Raise if another rank has failed."""
        if self._message is not None and not self._posted:
            raise RankError(f"another rank failed, so this one stops: {self._message}")

    def wait(self, work: Any) -> None:
        """Wait for an asynchronous collective on the host, but not for ranks that have failed."""
        pause = 2e-5
        while not work.is_completed():
            self.check()
            time.sleep(pause)
            pause = min(1e-3, pause * 1.3)
        work.wait()

    def _end(self) -> None:
        """Before the interpreter goes: no thread of ours is inside the store by then."""
        self._over.set()
        self._thread.join(timeout=5.0)
        # Nor one of gloo's: it lets go of a collective's tensors after having said that it is done,
        # and needs the interpreter for that. A thread that still waits for its turn when the
        # interpreter goes aborts the process ("terminate called without an active exception").
        time.sleep(_LAST_TURN)

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_EVERY):
            try:
                if self._store.check([_KEY]):
                    self._message = self._store.get(_KEY).decode()
                    break
            except Exception:  # the process group is gone, and with it what we watch for
                return
        if self._posted or self._over.wait(_GRACE):
            return
        sys.stderr.write(f"wholebatch: another rank failed, so this one stops: {self._message}\n")
        sys.stderr.flush()
        os._exit(1)

    def _excepthook(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        self._previous_hook(kind, error, trace)
        self.post(error)
        if self._posted:
            time.sleep(3 * _LOOK_EVERY)  # the store may live in this process: let them read it


_alarms: dict[int, Alarm] = {}  # one for each job's store that this process is part of


def alarm() -> Alarm:
    """The alarm of the default process group."""
    store = dist.distributed_c10d._get_default_store()
    if id(store) not in _alarms:
        _alarms[id(store)] = Alarm(store, dist.get_rank())
    return _alarms[id(store)]
