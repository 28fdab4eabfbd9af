"""Rows as child processes: they get ready side by side, and are timed one at a time.

While one is timed, all others are stopped with everything that they have started (a compiler's
workers too), so nothing runs beside it. What is prepared together must fit into the device's
memory together; a row that does not fit beside others waits until it can be alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Child", "Expected", "Spec", "run_rows", "signal_group", "stopped"]

Spec = tuple[str, str, int]
"""Model, loop, micro-batch size."""

DEVICE_GIB = 125.0
WARM_UP = 200.0  # seconds that a row may take to get ready


@dataclass(frozen=True)
class Expected:
    """What a row takes by itself: seconds from its start to its end, and GiB of the device."""

    seconds: float
    gib: float


def signal_group(leader: int, number: signal.Signals) -> None:
    """Send a signal to a process that leads its own group, and to all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


@contextlib.contextmanager
def stopped(leaders: Sequence[int]) -> Iterator[None]:
    """Stop these process groups within this context."""
    for leader in leaders:
        signal_group(leader, signal.SIGSTOP)
    try:
        yield
    finally:
        for leader in leaders:
            signal_group(leader, signal.SIGCONT)


class Child:
    """One process, and the lines that it printed."""

    def __init__(
        self, script: Path, spec: Spec, options: Sequence[str], paths: str, gib: float
    ) -> None:
        self.spec = spec
        self.gib = gib
        self.row: dict[str, Any] | None = None
        self.settled = threading.Event()  # it waits for a word, or has ended
        self.ended = False
        self.began = time.monotonic()
        self.stopped = 0.0  # seconds that it was made to wait
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (open as long as the child)
        environment = {
            **os.environ,
            "PYTHONPATH": paths,
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, min(4, (os.cpu_count() or 1) // 4))),
        }
        child = ["--child", "/".join(map(str, spec)), *options]
        self.process = subprocess.Popen(
            [sys.executable, str(script), *child],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
            start_new_session=True,  # a group of its own, to be stopped as one
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ROW "):
                self.row = json.loads(line[4:])
            if line.startswith(("READY", "ROW ")):
                self.settled.set()
        self.ended = True  # with or without a row; said before it is settled
        self.settled.set()

    def say(self, word: str) -> None:
        """Tell it to go on: its windows count from here."""
        assert self.process.stdin is not None
        self.settled.clear()
        try:
            self.process.stdin.write(f"{word}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it ends, and its last line has been read or will be
        if self.ended:  # before the event was cleared, perhaps: nobody would set it again
            self.settled.set()

    def named(self, error: str) -> dict[str, Any]:
        """A row that says why there is none."""
        return {**dict(zip(("model", "loop", "micro"), self.spec, strict=True)), "error": error}

    def end(self) -> None:
        """Kill what is left of it."""
        signal_group(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()

    def errors(self) -> str:
        """The end of what it wrote to its standard error."""
        self._errors.seek(0)
        return "\n".join(self._errors.read().splitlines()[-15:])


def run_rows(
    specs: Sequence[Spec],
    start: Callable[[Spec, float], Child],
    expect: Callable[[Spec], Expected],
    *,
    until: float,
    report: Callable[[dict[str, Any]], None],
    together: int = 4,
) -> None:
    """Report a row for every spec, in their order as far as they get ready in it.

    `until` is by time.monotonic(). `together` rows get ready side by side.
    """
    pending, active = list(specs), list[Child]()
    try:
        while pending or active:
            pending = _start(pending, active, start, expect, until, together)
            if not active:
                break
            child = _next(active, until)
            active.remove(child)
            if child.settled.is_set() and child.row is None and not child.ended:
                with _waiting(active):
                    child.say("go")
                    child.settled.wait(timeout=max(1.0, min(90.0, until - time.monotonic())))
            report(_result(child))
        for spec in pending:
            print(f"no time left for {'/'.join(map(str, spec))}", flush=True)
    finally:
        for child in active:
            child.end()


def _start(
    pending: list[Spec],
    active: list[Child],
    start: Callable[[Spec, float], Child],
    expect: Callable[[Spec], Expected],
    until: float,
    together: int,
) -> list[Spec]:
    """Begin what may be prepared now, beside what is; returns what is left."""
    left = []
    for spec in pending:
        wanted = expect(spec)
        if time.monotonic() + wanted.seconds > until:
            left.append(spec)
            continue
        held = sum(child.gib for child in active)
        if len(active) < together and (not active or held + wanted.gib <= DEVICE_GIB):
            active.append(start(spec, wanted.gib))
        else:
            left.append(spec)
    return left


def _next(active: Sequence[Child], until: float) -> Child:
    """The first that is ready, has failed, or has taken too long."""
    while True:
        for child in active:
            if child.settled.is_set():
                return child
        now = time.monotonic()
        for child in active:
            if now > until - 3 or now - child.began - child.stopped > WARM_UP:
                return child
        time.sleep(0.05)


@contextlib.contextmanager
def _waiting(children: Sequence[Child]) -> Iterator[None]:
    """Stop these within this context, and do not count the time against them."""
    began = time.monotonic()
    with stopped([child.process.pid for child in children]):
        yield
    for child in children:
        child.stopped += time.monotonic() - began


def _result(child: Child) -> dict[str, Any]:
    """Return the row of a process, and end it."""
    row = child.row or child.named(
        "ended without a result" if child.ended else "did not end in time"
    )
    if "error" in row:
        print(child.errors(), flush=True)
    child.end()
    return row
