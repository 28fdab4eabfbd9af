"""A thread that compiles a joint step while the run goes on with the graph as traced.

Replaying a captured graph needs little of Python's lock, so the windows hardly slow down. The
thread has a CUDA stream of its own: a kernel that it tunes must not wait for the training, nor be
part of a capture there (captures use `capture_error_mode="thread_local"`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from wholebatch.compile.joint_graph import JointStep


class CompileThread:
    """Runs `make`, which compiles the graph `source`, in a thread; `result()` waits for it."""

    def __init__(self, source: object, make: Callable[[], JointStep], device: torch.device) -> None:
        self.source = source
        self._make = make
        self._device = device
        self._made: JointStep | None = None
        self._problem: BaseException | None = None
        # A daemon: a program that ends does not wait for the compiler.
        self._thread = threading.Thread(target=self._run, name="wholebatch compiler", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
                stream = torch.cuda.Stream(self._device)
                with torch.cuda.stream(stream):
                    self._made = self._make()
                stream.synchronize()
            else:
                self._made = self._make()
        except BaseException as problem:  # `result` raises it in the thread that asks
            self._problem = problem

    @property
    def done(self) -> bool:
        """True if `result()` does not wait."""
        return not self._thread.is_alive()

    def result(self) -> JointStep:
        """Wait for the joint step and return it, or raise what the compiler raised."""
        self._thread.join()
        if self._problem is not None:
            raise self._problem
        assert self._made is not None
        return self._made
