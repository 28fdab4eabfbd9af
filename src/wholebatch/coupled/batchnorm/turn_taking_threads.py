"""Threads that take turns: one is awake at a time.

Each party runs ordinary code in its own thread until it reaches a meeting. There it leaves a value,
wakes the next party and sleeps. The last party to arrive merges the values in the order of the
parties, and the next round begins. So the order is fixed, there are no races, and a party can pause
in the middle of a forward or a backward pass.

Lock-step interleaves the micro-batches. If they shared one generator, dropout in a checkpointed
block would be recomputed with the numbers of another micro-batch. `Streams` gives each micro-batch
its own state, derived from the caller's generator, and sets it for each of its turns.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from wholebatch.errors import UnsupportedError

_GOLDEN = 0x9E3779B97F4A7C15


class Streams:
    """One random state per micro-batch on the CPU and on `devices`.

    The seed is drawn from the caller's CPU generator, which advances by the same amount for any
    number of micro-batches. `enter(k)` sets stream k and `leave(k)` saves its position. `close()`
    restores the caller's state; `rewind()` also undoes the draw of the seed.
    """

    def __init__(self, parties: int, devices: Iterable[torch.device] = ()) -> None:
        self._devices = sorted(
            {device for device in devices if device.type in ("cuda", "xpu")}, key=str
        )
        # Look the generators up once: their states are swapped at every meeting.
        self._generators = [torch.default_generator]
        for device in self._devices:
            module = torch.get_device_module(device.type)
            self._generators.append(module.default_generators[device.index])
        self._before = self._get()
        self.seed = draw()
        self._after = self._get()
        self._states = [self._seeded(_mix(self.seed, k)) for k in range(parties)]
        self._first = list(self._states)

    def enter(self, party: int) -> None:
        self._set(self._states[party])

    def leave(self, party: int) -> None:
        self._states[party] = self._get()

    def close(self) -> None:
        self._set(self._after)

    def drawn(self) -> frozenset[str]:
        """Return the device types that random numbers were drawn on, by the saved states."""
        kinds = ["cpu", *(device.type for device in self._devices)]
        return frozenset(
            kind
            for states, first in zip(self._states, self._first, strict=True)
            for kind, now, then in zip(kinds, states, first, strict=True)
            if not torch.equal(now, then)
        )

    def rewind(self) -> None:
        self._set(self._before)

    def _get(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _seeded(self, seed: int) -> list[Tensor]:
        places: list[torch.device] = [torch.device("cpu"), *self._devices]
        return [torch.Generator(place).manual_seed(seed).get_state() for place in places]


class RecordedStreams:
    """`Streams` inside a CUDA graph: the same numbers, from `generators` registered with the graph.

    Call `seed` before every replay.
    """

    def __init__(self, parties: int, device: torch.device) -> None:
        self._default = torch.cuda.default_generators[device.index or 0]
        self._own = self._default.graphsafe_get_state()
        self.generators = [torch.Generator(device) for _ in range(parties)]

    def seed(self, seed: int) -> None:
        """Make the next replay draw the numbers that `Streams` gives for this seed."""
        for party, generator in enumerate(self.generators):
            generator.manual_seed(_mix(seed, party))

    def enter(self, party: int) -> None:
        self._default.graphsafe_set_state(self.generators[party])

    def leave(self, party: int) -> None:
        return

    def close(self) -> None:
        self._default.graphsafe_set_state(self._own)


def draw() -> int:
    """Draw the seed of a window's streams from the caller's generator."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def _mix(seed: int, party: int) -> int:
    """Return the seed of stream `party`, by SplitMix64, so that streams are unrelated."""
    z = (seed + (party + 1) * _GOLDEN) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return (z ^ (z >> 31)) >> 1


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


class PartyState(Protocol):
    """State that each party has its own of, such as its random numbers and its memory."""

    def enter(self, party: int) -> None:
        """Set up the state of this party, which wakes."""

    def leave(self, party: int) -> None:
        """Save the state of this party, which goes to sleep."""


class TurnTakingThreads(Generic[R]):
    """Runs one body per party, with one party awake at a time.

    `states` are told which party wakes and which goes to sleep. While the thread that called `run`
    waits, it runs the jobs that parties pass to `call`, inside `around()`.

    The first exception ends every party: each unwinds, in turn, at the meeting where it sleeps.
    `run` then raises that exception unchanged, also for a KeyboardInterrupt of the caller.
    """

    def __init__(
        self,
        parties: int,
        states: Sequence[PartyState],
        *,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.parties = parties
        self._states = states
        self._around = around
        self._turns = [threading.Lock() for _ in range(parties)]
        self._alive = [True] * parties
        self._here = threading.local()
        self._over = threading.Lock()
        self._round: _Round | None = None
        self._job: tuple[int, Callable[[], Any]] | None = None
        self._answer: Any = None
        self._job_failure: BaseException | None = None
        self._failure: BaseException | None = None
        self._results: dict[int, R] = {}

    @property
    def party(self) -> int | None:
        """The party that this thread belongs to, or None outside of a run."""
        return getattr(self._here, "party", None)

    def run(self, body: Callable[[int], R]) -> list[R]:
        """Run `body(party)` for every party, in the caller's PyTorch state; return the results.

        A single party runs on the calling thread.
        """
        inherit = _inherited_state()
        if self.parties == 1:
            self._take_turn(0, lambda: inherit(lambda: body(0)))
        else:
            self._run_in_threads(lambda party: inherit(lambda: body(party)))
        if self._failure is not None:
            failure, self._failure = self._failure, None
            try:
                raise failure
            finally:
                del failure  # Break the cycle with its traceback, which would keep every tensor.
        return [self._results[party] for party in range(self.parties)]

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
            raise UnsupportedError(_other_way(party, place, "the end of its pass"))
        if current.place != place:
            raise UnsupportedError(_other_way(party, place, current.place))
        current.values.append(value)
        if party == self.parties - 1:
            current.result = merge(current.values)
            current.values.clear()
            self._round = None
        if self.parties > 1:
            for state in self._states:
                state.leave(party)
            self._turns[(party + 1) % self.parties].release()
            self._turns[party].acquire()
            if self._failure is not None:
                raise _Unwind
            self._enter(party)
        return current.result  # type: ignore[no-any-return]

    def call(self, job: Callable[[], V]) -> V:
        """Run `job()` on the thread that waits in `run`, and return its result."""
        party = self.party
        if party is None or self.parties == 1:
            return job()
        self._job = party, job
        self._over.release()
        self._turns[party].acquire()
        answer, failure = self._answer, self._job_failure
        self._answer = self._job_failure = None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure
        return answer  # type: ignore[no-any-return]

    def _run_in_threads(self, body: Callable[[int], R]) -> None:
        for lock in (*self._turns, self._over):
            lock.acquire()
        threads: list[threading.Thread] = []
        try:
            for party in range(self.parties):
                thread = threading.Thread(
                    target=self._live, args=(party, body), name=f"micro-batch {party}", daemon=True
                )
                thread.start()
                threads.append(thread)
        except BaseException as failure:
            self._fail(failure)
            for party in range(len(threads), self.parties):
                self._alive[party] = False
        if threads:
            self._turns[0].release()
            with self._around():
                self._wait(self._run_jobs)
        for thread in threads:
            self._wait(partial(_has_ended, thread))

    def _run_jobs(self) -> bool:
        """Run the parties' jobs; return True once all parties are done, False after a time-out."""
        while self._over.acquire(timeout=0.2):
            if self._job is None:
                return True
            (party, job), self._job = self._job, None
            try:
                self._answer = job()
            except BaseException as failure:
                self._job_failure = failure
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

    def _live(self, party: int, body: Callable[[int], R]) -> None:
        """Run a party on its own thread, then wake the next one that is alive, or the caller."""
        self._turns[party].acquire()
        self._take_turn(party, lambda: body(party))
        following = [(party + step) % self.parties for step in range(1, self.parties)]
        successor = next((other for other in following if self._alive[other]), None)
        (self._over if successor is None else self._turns[successor]).release()

    def _take_turn(self, party: int, body: Callable[[], R]) -> None:
        self._here.party = party
        try:
            if self._failure is None:
                self._enter(party)
                self._results[party] = body()
                if self._round is not None:
                    raise UnsupportedError(
                        _other_way(party, "the end of its pass", self._round.place)
                    )
        except _Unwind:
            pass
        except BaseException as failure:
            self._fail(failure)
        finally:
            self._alive[party] = False
            self._here.party = None

    def _enter(self, party: int) -> None:
        for state in self._states:
            state.enter(party)

    def _fail(self, failure: BaseException) -> None:
        if self._failure is None:
            self._failure = failure


def _has_ended(thread: threading.Thread) -> bool:
    thread.join(0.2)
    return not thread.is_alive()


def _other_way(party: int, place: str, elsewhere: str) -> str:
    return (
        f"micro-batch {party} came to {place} where micro-batch 0 came to {elsewhere}: exact "
        "BatchNorm needs all micro-batches to take the same way through the BatchNorms. Make the "
        "model's path independent of its input and of random numbers (a block that is skipped at "
        "random: multiply its output by 0 or 1 per sample instead), or name another policy "
        '(batchnorm="statistics")'
    )


def _inherited_state() -> Callable[[Callable[[], R]], R]:
    """Return a function that runs another in this thread's PyTorch state, on any thread.

    New threads do not inherit that state. Backward runs on the thread that calls it, also on CUDA:
    only then can a micro-batch pause in the middle of it without blocking the others.
    """
    kinds = ["cpu"]
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        kinds += [] if accelerator is None else [accelerator.type]
    casts = [(k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k)) for k in kinds]
    cast_cache = torch.is_autocast_cache_enabled()
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    device = torch.get_default_device()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    modes = tuple(_get_current_dispatch_mode_stack())  # Such as a memory meter.
    context = contextvars.copy_context()

    def run(function: Callable[[], R]) -> R:
        with ExitStack() as stack:
            if torch.get_default_device() != device:
                stack.enter_context(device)
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
            stack.enter_context(
                torch.inference_mode() if inference else torch.set_grad_enabled(grad)
            )
            for kind, dtype, enabled in casts:
                if enabled != torch.is_autocast_enabled(kind):
                    stack.enter_context(
                        torch.autocast(kind, dtype, enabled=enabled, cache_enabled=cast_cache)
                    )
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            for mode in modes:
                # Push the mode without entering it: the waiting thread has entered it already.
                _push_mode(mode)
                stack.callback(_pop_mode)
            return function()

    return lambda function: context.copy().run(run, function)
