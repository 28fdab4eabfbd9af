"""Run the text of a program in a process of its own, forked from one that has imported torch.

A fork costs a hundredth of an import. Nothing that a program leaves behind (hooks, warnings that
were given once, random numbers) reaches the next one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import logging
import math
import os
import pickle
import re
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LIMIT = 120.0
"""Seconds of CPU time after which a program is said to hang."""
_WAITS = 5
"""How many times as long it may take, on a machine with other work or waiting for its ranks."""


@dataclass(frozen=True)
class Outcome:
    """What a program did: the windows it reports, what it was told, and the error that ended it."""

    windows: list[dict[str, Any]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """Warnings, by `warnings` and by logging."""
    error: str | None = None
    refused: bool = False
    """True if the error is one that wholebatch raises on purpose."""
    traceback: str = ""


def warm_up(*texts: str) -> None:
    """Import what these programs import, so that every later fork has it already."""
    import torch

    torch.set_num_threads(1)
    for text in texts:
        listed = "\nimport json, sys\nprint(json.dumps([{'modules': [*sys.modules]}]))\n"
        ended = run(text + listed)
        for name in ended.windows[0]["modules"] if ended.windows and not ended.error else ():
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()


class _Logged(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run(text: str, limit: float = LIMIT) -> Outcome:
    """Return what the program does; one that does not end is killed."""
    answer = in_fork(lambda: _execute(text), limit)
    return answer if isinstance(answer, Outcome) else Outcome(error=answer)


def in_fork(function: Callable[[], Any], limit: float = LIMIT) -> Any:
    """Return the function's result, computed in a fork; or a sentence, if the fork has none."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        os.setpgid(0, 0)  # ended with all processes that it starts
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit), math.ceil(limit) + 5))
        status = 1
        try:
            with os.fdopen(writes, "wb") as answer:
                pickle.dump(function(), answer)
            status = 0
        finally:
            os._exit(status)
    os.close(writes)
    answer = _read(reads, child, _WAITS * limit)
    _, status = os.waitpid(child, 0)
    if answer is None:
        return f"hangs: did not end within {_WAITS * limit:.0f} s"
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return f"hangs: did not end within {limit:.0f} s of CPU time"
    return pickle.loads(answer) if answer else f"the process died with status {status}"


def _read(reads: int, child: int, limit: float) -> bytes | None:
    """Read until the child closes the pipe; None if it had to be killed."""
    ends, parts = time.monotonic() + limit, []
    try:
        while True:
            ready, _, _ = select.select([reads], [], [], max(0.0, ends - time.monotonic()))
            if not ready:
                with contextlib.suppress(ProcessLookupError):  # it has not said yet who it is
                    os.killpg(child, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                return None
            part = os.read(reads, 1 << 20)
            if not part:
                return b"".join(parts)
            parts.append(part)
    finally:
        os.close(reads)


@contextlib.contextmanager
def _main_module(text: str) -> Iterator[tuple[types.CodeType, dict[str, Any]]]:
    """Give the text's code and the namespace of `__main__`, as `python program.py` has them."""
    path = Path(tempfile.gettempdir()) / f"wholebatch_program_{os.getpid()}.py"
    path.write_text(text, encoding="utf-8")  # a real file: torch and others read the source
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    sys.modules["__main__"] = module
    sys.argv = [str(path)]
    with open(os.devnull, "w") as nothing:  # processes of its own write there, too
        os.dup2(nothing.fileno(), 2)
    try:
        yield compile(text, str(path), "exec"), module.__dict__
    finally:
        path.unlink()


def run_as_main(text: str) -> str:
    """Execute the text as a script, quietly; return the traceback of its error, or ""."""
    with (
        _main_module(text) as (code, scope),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            exec(code, scope)
        except BaseException:
            return traceback.format_exc()
    return ""


def _execute(text: str) -> Outcome:
    """Execute the text as `python program.py` would, in this process."""
    logged, printed = _Logged(), io.StringIO()
    logging.getLogger("wholebatch").addHandler(logged)
    logging.getLogger("wholebatch").propagate = False
    error, refused, where = None, False, ""
    with _main_module(text) as (code, scope), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
                exec(code, scope)
                scope.clear()  # the end of a script: an open window is warned of
                gc.collect()
        except BaseException as failure:
            error = f"{type(failure).__name__}: {failure}"
            refused = any(kind.__name__ == "WholebatchError" for kind in type(failure).__mro__)
            where = traceback.format_exc()
            if of_rank := re.search(r"^wholebatch\.errors\.(\w+: .*)", str(failure), re.M | re.S):
                error, refused = of_rank[1], True  # torch tells it as the text of a traceback
    said = [*logged.lines, *(str(warning.message) for warning in caught)]
    lines = printed.getvalue().strip().splitlines()
    noted = scope.get("record", [])  # of the windows before the error
    windows = json.loads(lines[-1]) if lines and error is None else noted
    return Outcome(windows, said, error, refused, where)
