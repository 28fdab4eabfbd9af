"""Threads that take turns: only the one that holds the baton is awake.

Each party runs ordinary code in its own thread until it reaches a meeting. There it leaves a value,
passes the baton to the next party and sleeps. The last party to arrive merges the values in the
order of the parties, and the next round begins. So the order is fixed, there are no races, and a
party can pause in the middle of a forward or a backward pass.


---
The PyTorch state of a thread, for threads that it starts: they do not inherit it."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from wholebatch.errors import UnsupportedError

__all__ = ["Baton", "Inherited"]


R = TypeVar("R")
V = TypeVar("V")
M = TypeVar("M")


class _Unwind(BaseException):
    """Raised in a sleeping party to end it after another one failed. Never leaves this module."""


@dataclass(slots=True)
class _Round:
    """One meeting: its place, and the values brought so far."""

    place: str
    values: list[Any] = field(default_factory=list)
    result: Any = None


class Baton(Generic[R]):
    """A runner of one body per party, with one party awake at a time.

    `enter(k)` is called when party k receives the baton, and `leave(k)` when it passes it on. They
    set up what the party needs, such as its random numbers and its memory. While the thread that
    called `run` waits, it runs the jobs that parties pass to `call`, inside `around()`.

    The first exception ends every party: each unwinds, in turn, at the meeting where it sleeps.
    `run` then raises that exception unchanged, also for a KeyboardInterrupt of the caller.
    """

    def __init__(
        self,
        parties: int,
        *,
        enter: Callable[[int], object] = lambda party: None,
        leave: Callable[[int], object] = lambda party: None,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._parties = parties
        self._enter = enter
        self._leave = leave
        self._around = around
        self._turns = [threading.Lock() for _ in range(parties)]
        self._alive = [True] * parties
        self._here = threading.local()
        self._over = threading.Lock()
        self._round: _Round | None = None
        self._job: tuple[int, Callable[[], Any]] | None = None
        self._answer: Any = None
        self._mishap: BaseException | None = None
        self._failure: BaseException | None = None

    @property
    def party(self) -> int | None:
        """The party that this thread belongs to, or None outside of a run."""
        return getattr(self._here, "party", None)

    def run(self, bodies: Sequence[Callable[[], R]]) -> list[R]:
        """Run every body and return their results. A single body runs on the calling thread."""
        results: dict[int, R] = {}
        if self._parties == 1:
            self._turn(0, bodies[0], results)
        else:
            self._in_threads(bodies, results)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            try:
                raise failure
            finally:
                del failure  # Break the cycle with its traceback, which would keep every tensor.
        return [results[party] for party in range(self._parties)]

    def meet(self, place: str, value: V, merge: Callable[[list[V]], M]) -> M:
        """Wait for all parties to reach `place`, and return `merge` of their values in order."""
        party = self.party
        if party is None:
            raise UnsupportedError(
                f"{place} was reached on a thread that is not one of the micro-batches': "
                "the model must be run on the thread that calls it"
            )
        if self._failure is not None:
            raise _Unwind
        if party == 0:
            self._round = _Round(place)
        current = self._round
        if current is None:
            raise UnsupportedError(_other_way(party, place, 0, "the end of its pass"))
        if current.place != place:
            raise UnsupportedError(_other_way(party, place, 0, current.place))
        current.values.append(value)
        if party == self._parties - 1:
            current.result = merge(current.values)
            current.values.clear()
            self._round = None
        if self._parties > 1:
            self._leave(party)
            self._turns[(party + 1) % self._parties].release()
            self._sleep(party)
        return current.result  # type: ignore[no-any-return]

    def call(self, job: Callable[[], V]) -> V:
        """Run `job()` on the thread that waits in `run`, and return its result."""
        party = self.party
        if party is None or self._parties == 1:
            return job()
        self._job = party, job
        self._over.release()
        self._turns[party].acquire()
        answer, mishap = self._answer, self._mishap
        self._answer = self._mishap = None
        if mishap is not None:
            try:
                raise mishap
            finally:
                del mishap
        return answer  # type: ignore[no-any-return]

    def _in_threads(self, bodies: Sequence[Callable[[], R]], results: dict[int, R]) -> None:
        for lock in (*self._turns, self._over):
            lock.acquire()
        threads: list[threading.Thread] = []
        try:
            for party, body in enumerate(bodies):
                thread = threading.Thread(
                    target=self._thread,
                    args=(party, body, results),
                    name=f"micro-batch {party}",
                    daemon=True,
                )
                thread.start()
                threads.append(thread)
        except BaseException as failure:
            self._fail(failure)
            for party in range(len(threads), self._parties):
                self._alive[party] = False
        if threads:
            self._turns[0].release()
            with self._around():
                self._wait(self._serve)
        for thread in threads:
            self._wait(partial(_ended, thread))

    def _serve(self) -> bool:
        """Run the parties' jobs; return True once all parties are done, False after a time-out."""
        while self._over.acquire(timeout=0.2):
            if self._job is None:
                return True
            (party, job), self._job = self._job, None
            try:
                self._answer = job()
            except BaseException as mishap:
                self._mishap = mishap
            del job
            self._turns[party].release()
        return False

    def _wait(self, until: Callable[[], bool]) -> None:
        # An interrupt of the caller ends the parties. They still use the model, so wait for them.
        # Wait with short time-outs: an interrupt may reach a thread that does not wake this one.
        over = False
        while not over:
            try:
                over = until()
            except BaseException as failure:
                self._fail(failure)

    def _thread(self, party: int, body: Callable[[], R], results: dict[int, R]) -> None:
        self._turns[party].acquire()
        self._turn(party, body, results)
        following = [(party + step) % self._parties for step in range(1, self._parties)]
        successor = next((other for other in following if self._alive[other]), None)
        if successor is None:
            self._over.release()
        else:
            self._turns[successor].release()

    def _turn(self, party: int, body: Callable[[], R], results: dict[int, R]) -> None:
        self._here.party = party
        try:
            if self._failure is None:
                self._enter(party)
                results[party] = body()
                if self._round is not None:
                    missed = self._round.place
                    raise UnsupportedError(_other_way(party, "the end of its pass", 0, missed))
        except _Unwind:
            pass
        except BaseException as failure:
            self._fail(failure)
        finally:
            self._alive[party] = False
            self._here.party = None

    def _sleep(self, party: int) -> None:
        self._turns[party].acquire()
        if self._failure is not None:
            raise _Unwind
        self._enter(party)

    def _fail(self, failure: BaseException) -> None:
        if self._failure is None:
            self._failure = failure


def _ended(thread: threading.Thread) -> bool:
    thread.join(0.2)
    return not thread.is_alive()


def _other_way(party: int, place: str, other: int, elsewhere: str) -> str:
    return (
        f"micro-batch {party} came to {place} where micro-batch {other} came to {elsewhere}: exact "
        "BatchNorm needs all micro-batches to take the same way through the BatchNorms. Make the "
        "model's path independent of its input and of random numbers (a block that is skipped at "
        "random: multiply its output by 0 or 1 per sample instead), or name another policy "
        '(batchnorm="statistics")'
    )


R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Autocast:
    device: str
    dtype: torch.dtype
    enabled: bool


@dataclass(frozen=True, slots=True)
class Inherited:
    """The calling thread's PyTorch state, under which another thread can run a function."""

    context: contextvars.Context
    grad: bool
    inference: bool
    autocast: tuple[_Autocast, ...]
    autocast_cache: bool
    device: torch.device
    cuda_stream: torch.cuda.Stream | None
    modes: tuple[Any, ...]
    """The dispatch modes of the caller, such as a memory meter."""

    @classmethod
    def of_this_thread(cls) -> Inherited:
        kinds = ["cpu"]
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            kinds.append(accelerator.type)
        on_cuda = torch.cuda.is_initialized()
        return cls(
            context=contextvars.copy_context(),
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                _Autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
                for kind in kinds
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            device=torch.get_default_device(),
            cuda_stream=torch.cuda.current_stream() if on_cuda else None,
            modes=tuple(_get_current_dispatch_mode_stack()),
        )

    def run(self, function: Callable[[], R]) -> R:
        """Run `function()` under this state and return its result.

        Backward runs on the thread that calls it, also on CUDA. Only then can a micro-batch pause
        in the middle of its backward without blocking the others.
        """
        return self.context.copy().run(self._run, function)

    def _run(self, function: Callable[[], R]) -> R:
        with ExitStack() as stack:
            if torch.get_default_device() != self.device:
                stack.enter_context(self.device)
            if self.cuda_stream is not None:
                stack.enter_context(torch.cuda.stream(self.cuda_stream))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            else:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            for cast in self.autocast:
                if cast.enabled != torch.is_autocast_enabled(cast.device):
                    stack.enter_context(
                        torch.autocast(
                            cast.device,
                            dtype=cast.dtype,
                            enabled=cast.enabled,
                            cache_enabled=self.autocast_cache,
                        )
                    )
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            for mode in self.modes:
                # Push the mode without entering it: the waiting thread has entered it already.
                _push_mode(mode)
                stack.callback(_pop_mode)
            return function()
