"""Compile a joint step in a thread while the run goes on with the graph as traced.

Replaying a captured graph needs little of Python's lock, so the windows hardly slow down. The
thread has a CUDA stream of its own: a kernel that it tunes must not wait for the training, nor be
part of a capture there (captures use `capture_error_mode="thread_local"`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

T = TypeVar("T")


def in_a_thread(make: Callable[[], T], device: torch.device) -> Future[T]:
    """Run `make` in a thread of its own, and return the future of its result."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            if device.type != "cuda":
                future.set_result(make())
                return
            torch.cuda.set_device(device)
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                result = make()
            stream.synchronize()
            future.set_result(result)
        except BaseException as problem:  # `result` raises it in the thread that asks
            future.set_exception(problem)

    # A daemon, unlike the threads of an executor: a program that ends does not wait for it.
    threading.Thread(target=run, name="wholebatch compiler", daemon=True).start()
    return future
