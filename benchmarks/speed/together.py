"""Rows as child processes: they warm up side by side, and are timed one at a time."""

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Spec", "run_together"]

Spec = tuple[str, str, int]
"""Model, mode, micro-batch size (0: the whole batch)."""


class Child:
    """One process, and the lines that it printed."""

    def __init__(self, script: Path, spec: Spec, options: Sequence[str], paths: str) -> None:
        self.spec = spec
        self.row: dict[str, Any] | None = None
        self.ready = threading.Event()
        self.done = threading.Event()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (open as long as the child)
        environment = {
            **os.environ,
            "PYTHONPATH": paths,
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TORCHINDUCTOR_COMPILE_THREADS": "4",
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
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("READY"):
                self.ready.set()
            elif line.startswith("ROW "):
                self.row = json.loads(line[4:])
                self.done.set()
        self.done.set()  # it ended, with or without a row

    def say(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.done.set()

    def named(self) -> dict[str, Any]:
        """The beginning of its row."""
        return dict(zip(("model", "mode", "micro"), self.spec, strict=True))

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def errors(self) -> str:
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


def run_together(
    script: Path,
    specs: Sequence[Spec],
    options: Sequence[str],
    paths: str,
    *,
    until: float,
    warm_up: float,
    report: Callable[[dict[str, Any]], None],
) -> None:
    """Report a row for every spec. `until` is by time.monotonic(); `warm_up` in seconds."""
    children = [Child(script, spec, options, paths) for spec in specs]
    try:
        waiting = _wait(children, min(time.monotonic() + warm_up, until))
        late = [child for child in children if child not in waiting]
        for child in late:
            child.signal(signal.SIGSTOP)  # it would disturb those that are timed
        for child in waiting:
            report(_timed(child, until))
        for child in late:
            child.signal(signal.SIGCONT)
        while late and time.monotonic() < until - 5:
            ready = _wait(late, min(time.monotonic() + warm_up / 2, until - 5))
            if not ready:
                break
            late = [child for child in late if child not in ready]
            for child in ready:
                report(_timed(child, until))
        for child in late:
            report({**child.named(), "error": "was not ready in time"})
            print(child.errors(), flush=True)
    finally:
        for child in children:
            child.signal(signal.SIGKILL)


def _wait(children: Sequence[Child], deadline: float) -> list[Child]:
    """Those that are ready (or have failed) when all are, or when the time is over."""

    def settled() -> list[Child]:
        return [child for child in children if child.ready.is_set() or child.done.is_set()]

    while time.monotonic() < deadline and len(settled()) < len(children):
        time.sleep(0.1)
    return settled()


def _timed(child: Child, until: float) -> dict[str, Any]:
    child.say()
    child.done.wait(timeout=max(0.0, min(60.0, until - time.monotonic())))
    row = child.row or {**child.named(), "error": "did not end in time"}
    if "error" in row:
        print(child.errors(), flush=True)
    else:
        row["driver_gib"] = child.driver_gib()
    child.signal(signal.SIGKILL)
    return row
