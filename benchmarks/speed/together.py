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
from pathlib import Path
from typing import Any

from speed.plan import Expected, Spec

__all__ = ["Child", "run_rows", "signal_group", "stopped"]

DEVICE_GIB = 125.0


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
        model, mode, micro = spec
        child = ["--child", mode, "--models", model, "--micro", str(micro), *options]
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
        """Tell it to go on ("go": time some windows, "end": that was all)."""
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
        return {**dict(zip(("model", "mode", "micro"), self.spec, strict=True)), "error": error}

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

    def driver_gib(self) -> float | None:
        """What the driver says that this process holds."""
        query = [
            "nvidia-smi",
            "--query-compute-apps=pid,used_memory",
            "--format=csv,noheader,nounits",
        ]
        try:
            told = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
            for line in told.stdout.splitlines():
                pid, used = line.split(",")
                if int(pid) == self.process.pid:
                    return float(used) / 1024
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
        return None


def run_rows(
    specs: Sequence[Spec],
    start: Callable[[Spec, float], Child],
    expect: Callable[[Spec], Expected],
    *,
    until: float,
    together: int,
    warm_up: float,
    rounds: int,
    report: Callable[[dict[str, Any]], None],
) -> None:
    """Report a row for every spec, in their order as far as they get ready in it.

    `until` is by time.monotonic(); `warm_up`, in seconds, is what one row may take to get ready.
    With more than one of `rounds`, all rows are made ready first and take turns: what disturbs the
    machine for a while disturbs them all.
    """
    pending, active, ready = list(specs), list[Child](), list[Child]()
    try:
        while pending or active:
            pending = _start(pending, active, start, expect, until, together)
            if not active:
                break
            child = _next(active, until, warm_up)
            active.remove(child)
            if not child.settled.is_set() or child.row is not None or child.ended:
                report(_result(child))
            elif rounds > 1:
                signal_group(child.process.pid, signal.SIGSTOP)
                ready.append(child)
            else:
                with _waiting(active):
                    _turn(child, until)
                    row = _result(child, wait=until)
                report(row)
        for _ in range(rounds if ready else 0):
            for child in ready:
                signal_group(child.process.pid, signal.SIGCONT)
                _turn(child, until)
                signal_group(child.process.pid, signal.SIGSTOP)
        for child in list(ready):
            signal_group(child.process.pid, signal.SIGCONT)
            report(_result(child, wait=until))
        for spec in pending:
            print(f"no time left for {'/'.join(map(str, spec))}", flush=True)
    finally:
        for child in (*active, *ready):
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


def _next(active: Sequence[Child], until: float, warm_up: float) -> Child:
    """The first that is ready, has failed, or has taken too long."""
    while True:
        for child in active:
            if child.settled.is_set():
                return child
        now = time.monotonic()
        for child in active:
            if now > until - 3 or now - child.began - child.stopped > warm_up:
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


def _turn(child: Child, until: float) -> None:
    """Time some windows of it."""
    child.say("go")
    child.settled.wait(timeout=max(1.0, min(90.0, until - time.monotonic())))


def _result(child: Child, *, wait: float | None = None) -> dict[str, Any]:
    """Its row; the process is over then."""
    if wait is not None and child.row is None and child.settled.is_set():
        child.say("end")
        child.settled.wait(timeout=max(1.0, min(60.0, wait - time.monotonic())))
    row = child.row or child.named(
        "ended without a result" if child.ended else "did not end in time"
    )
    if "error" in row:
        print(child.errors(), flush=True)
    else:
        row["driver_gib"] = child.driver_gib()
    child.end()
    return row
