"""A whole lock-step window captured as one CUDA graph: one launch instead of thousands.

Lock-step launches small kernels from threads that take turns, so the device waits for the host. To
record a window, the threads run once more, and CUDA captures their launches instead of running
them. A replay needs no threads, no meetings and no host.

A recording is valid for windows whose micro-batches have the same shapes. The conditions it was
made under (the model's plain attributes, the addresses of its tensors) are checked again at every
window. A recording is used only after it has given the same gradients as the threads, with the same
random numbers. Models that draw random numbers on the host, branch on the values of tensors, or
have other Python side effects are not recorded: their windows run by threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from wholebatch.compile.captured_state import Fingerprint, only_reads, refuse_hooks
from wholebatch.compile.cuda_graph import capturing
from wholebatch.compile.execute_mode import CannotTrace, Notes, first_line
from wholebatch.compile.graph_check import differs
from wholebatch.compile.graph_inputs import Inputs, Key, take_apart
from wholebatch.compile.trace import Form
from wholebatch.coupled.batchnorm.lock_step import LockStep
from wholebatch.coupled.batchnorm.turn_taking_threads import RecordedStreams, draw
from wholebatch.distributed.sync_strategy import Single
from wholebatch.losses.loss import SINGLE, Loss, Terms
from wholebatch.window.forward_state import ForwardState
from wholebatch.window.window import Backward, Window, backward_into

R = TypeVar("R")
T = TypeVar("T")
Micro = tuple[list[Tensor], list[Tensor]]
"""The totals of one micro-batch, and those of its units that are tensors."""

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)
_EAGER_WINDOWS = 2
"""Windows of a kind that run by threads before one is recorded, which takes about as long."""
_KINDS = 3
MOST_MICRO_BATCHES = 128
"""The most micro-batches in a recorded window: a CUDA graph needs memory for every kernel."""


@dataclass
class _Recording:
    """A window that can be replayed, with the memory of its inputs and of its results."""

    tape: Tape
    inputs: list[list[Tensor]]
    seeds: dict[str, Tensor]
    forms: list[Form]
    results: list[Micro]
    gradients: list[tuple[nn.Parameter, Tensor]]
    addresses: list[int]
    streams: RecordedStreams | None
    done: torch.cuda.Event | None = None

    def play(self, seed: int) -> None:
        """Replay it with the random numbers that the threads would draw with this seed."""
        if self.streams is not None:
            self.streams.seed(seed)
        self.tape.replay()
        if self.done is not None:
            self.done.record()


class Recorder:
    """Runs the lock-step windows of one WholeBatch: by threads, or by replaying a recording.

    `forward(micro)` returns the loss of a micro-batch that may still be on the host. With
    `execute="graph"` the second window is a replay, or a warning says why it cannot be. With "auto"
    the third is, where possible. `sixteen_bit` is True if the forward computes in 16 bit.
    """

    def __init__(
        self,
        lock_step: LockStep,
        *,
        model: nn.Module,
        loss: Callable[..., Any],
        window: Window,
        forward: Callable[[Any], Loss | Terms],
        execute: str,
        sixteen_bit: bool,
        tape: Callable[[], Tape] | None = None,
    ) -> None:
        self._lock_step = lock_step
        self._model = model
        self._loss = loss
        self._window = window
        self._forward = forward
        self._eager_windows = 1 if execute == "graph" else _EAGER_WINDOWS
        self._sixteen_bit = sixteen_bit
        self._tape = tape or self._cuda_tape
        self.notes = Notes(asked=execute == "graph")
        self.mode = "threads"
        self._off = execute not in ("auto", "graph") or (
            tape is None and window.target.device.type != "cuda"
        )
        self.forget()

    def _free_memory(self) -> bool:
        """Free the memory of all recordings; return True if there were any."""
        held = bool(self._recordings)
        self.forget()
        return held

    def forget(self) -> None:
        """Drop every recording and its memory."""
        self._fingerprint: Fingerprint | None = None
        self._parameters: list[nn.Parameter] = []
        self._recordings: dict[Key, _Recording] = {}
        self._seen: dict[Key, int] = {}
        self._pool: Any = None
        self._lock_step.recorded_pools.clear()

    def run(
        self, micros: Sequence[Any], *, forward: Callable[[Any], T], backward: Callable[[T], None]
    ) -> None:
        """Run one window: add its gradients, and enter its totals and units in the ledger.

        `forward` and `backward` are those of `LockStep.run`, for a window that runs by threads.
        """
        self.mode = "threads"
        apart: list[Inputs] = []
        if not self._off and 1 < len(micros) <= MOST_MICRO_BATCHES:
            try:
                apart = [take_apart(micro) for micro in micros]
                recording = self._recording(apart)
            except CannotTrace as reason:
                apart = []
                self._give_up(str(reason))
            else:
                if recording is not None:
                    self.mode = "recording"
                    self._replay(recording, apart)
                    return
        try:
            self._lock_step.run(
                micros, forward=forward, backward=backward, free_memory=self._free_memory
            )
        except torch.OutOfMemoryError:
            self.forget()  # The recordings may hold the missing memory.
            raise
        if apart:
            self._note(apart)

    def _note(self, apart: list[Inputs]) -> None:
        """Count a window that has run by threads; record it if enough of its kind have."""
        if self._fingerprint is None:
            self._remember_conditions()
        key = self._key(apart)
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] >= self._eager_windows and len(self._recordings) < _KINDS:
            try:
                self._recordings[key] = self._make(apart)
            except CannotTrace as reason:
                self._give_up(str(reason))
            except torch.OutOfMemoryError:  # The window itself has already succeeded.
                self._give_up("a recording has memory of its own, and there is not enough")

    def _key(self, apart: list[Inputs]) -> Key:
        return (self._lock_step.holding, *(inputs.key for inputs in apart))

    def _recording(self, apart: list[Inputs]) -> _Recording | None:
        """Return the recording for these micro-batches if there is one and it is still valid."""
        window = self._window
        if not window.open_early():
            return None
        same = len(self._parameters) == len(window.now.inputs) and all(
            a is b for a, b in zip(self._parameters, window.now.inputs, strict=True)
        )
        if not same or self._fingerprint is None or not self._fingerprint.holds():
            self.forget()
            self._remember_conditions()
        key = self._key(apart)
        found = self._recordings.get(key)
        if found is not None and found.addresses != self._addresses():
            del self._recordings[key]  # A tensor of the model has moved.
            return None
        return found

    def _remember_conditions(self) -> None:
        """Store the conditions that new recordings are made under."""
        self._fingerprint = Fingerprint(self._model, self._loss)
        self._parameters = list(self._window.now.inputs)

    def _cuda_tape(self) -> Tape:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return CudaTape(self._pool)

    # ----------------------------------------------------------------- replay

    def _replay(self, recording: _Recording, apart: list[Inputs]) -> None:
        seed = draw()  # As the threads do: later random numbers must not depend on who ran.
        self._fill(recording, apart)
        recording.play(seed)
        for parameter, gradient in recording.gradients:
            parameter.grad = gradient
        for form, (totals, units) in zip(recording.forms, recording.results, strict=True):
            counted = iter(units)
            self._window.current.record(
                {n: t.clone() for n, t in zip(form.names, totals, strict=True)},
                {
                    name: next(counted).clone() if number is None else number
                    for name, number in zip(form.names, form.units, strict=True)
                },
                dict(zip(form.names, form.weights, strict=True)),
            )
            self._window.micro_batch_done()

    @torch.no_grad()
    def _fill(self, recording: _Recording, apart: list[Inputs]) -> None:
        if recording.done is not None:
            recording.done.synchronize()  # The last replay may still be reading host memory.
        for statics, inputs in zip(recording.inputs, apart, strict=True):
            for static, tensor in zip(statics, inputs.tensors, strict=True):
                static.copy_(tensor, non_blocking=True)
        form = recording.forms[0]
        for name, weight in zip(form.names, form.weights, strict=True):
            seed = recording.seeds[name]
            seed.copy_(self._window.current.seed_of(name, seed, weight))

    def _addresses(self) -> list[int]:
        tensors: list[Tensor] = [*self._model.parameters(), *self._model.buffers()]
        return [tensor.data_ptr() for tensor in tensors]

    # ------------------------------------------------------------------- make

    def _make(self, apart: list[Inputs]) -> _Recording:
        """Record the window that the threads have just run, and compare the two results."""
        window = self._window
        if self._lock_step.drawn - {"cuda"}:
            raise CannotTrace("it draws random numbers on the host, which no replay would do")
        if self._lock_step.drawn and self._lock_step.holding == "inputs":
            raise CannotTrace("it draws random numbers in blocks that are computed again")
        if window.target.sixteen_bit.parameters:
            raise CannotTrace("gradients of 16-bit parameters are added by hooks")
        store = window.store
        if store.only_eager is not None:
            raise CannotTrace(store.only_eager)
        if not isinstance(window.sync, Single):
            raise CannotTrace("an engine for several ranks holds parts of its graph")
        refuse_hooks(self._model)
        wanted = [parameter.grad for parameter in self._parameters]
        totals = {name: made[-len(apart) :] for name, made in window.current.totals.items()}
        after = ForwardState(self._model)
        try:
            recording = self._captured(apart, {n: _dtype(made[0]) for n, made in totals.items()})
            self._fill(recording, apart)
            recording.play(self._lock_step.seed)
            self._compare(recording, wanted, totals)
        finally:
            after.restore()
            for parameter, gradient in zip(self._parameters, wanted, strict=True):
                parameter.grad = gradient
        self.notes.tell(f"recorded a lock-step window of {len(apart)} micro-batches")
        return recording

    def _captured(self, apart: list[Inputs], dtypes: dict[str, torch.dtype]) -> _Recording:
        """Capture the window on static inputs; the gradients end in memory of the recording."""
        device = self._parameters[0].device
        on_host = self._lock_step.holding == "host"  # The device must not hold the whole batch.
        if device.type == "cuda":
            torch.cuda.empty_cache()  # Keep lasting memory out of gaps between temporary memory.
        inputs = [
            [_static(tensor, device, on_host=on_host) for tensor in one.tensors] for one in apart
        ]
        micros = [one.around(statics) for one, statics in zip(apart, inputs, strict=True)]
        seeds = {n: torch.ones((), dtype=dtype, device=device) for n, dtype in dtypes.items()}
        forms: list[Form] = []
        backward = self._captured_backward(seeds, forms)
        for parameter in self._parameters:
            parameter.grad = None
        tape = self._tape()
        streams = self._lock_step.recorded_streams(len(micros))

        def run() -> list[Micro]:
            return self._lock_step.record(
                micros, forward=self._forward, backward=backward, streams=streams
            )

        try:
            with only_reads(self._model, self._loss):
                results = tape.record(run, [] if streams is None else streams.generators)
        except (CannotTrace, torch.OutOfMemoryError):
            raise
        except Exception as problem:  # A model can break a capture in any way.
            raise CannotTrace(f"CUDA cannot record it ({first_line(problem)})") from problem
        done = torch.cuda.Event() if device.type == "cuda" and on_host else None
        gradients = [(p, p.grad) for p in self._parameters if p.grad is not None]
        return _Recording(
            tape, inputs, seeds, [*forms], results, gradients, self._addresses(), streams, done
        )

    def _captured_backward(
        self, seeds: Mapping[str, Tensor], forms: list[Form]
    ) -> Callable[[Loss | Terms], Micro]:
        """Return the backward of a captured micro-batch, which adds the form of its loss."""
        backwards: list[Backward] = []

        def backward(loss: Loss | Terms) -> Micro:
            forms.append(Form.of(loss, SINGLE))
            terms = [loss] if isinstance(loss, Loss) else list(loss.by_name.values())
            totals = [term.total for term in terms]
            if not backwards:
                backwards.append(backward_into(self._parameters, [self._model], totals))
            backwards[0].run(totals, [seeds[name] for name in forms[-1].names])
            units = [term.units for term in terms]
            return (
                [total.detach() for total in totals],
                [unit.detach() for unit in units if isinstance(unit, Tensor)],
            )

        return backward

    def _compare(
        self,
        recording: _Recording,
        wanted: list[Tensor | None],
        totals: Mapping[str, Sequence[Tensor | float]],
    ) -> None:
        """Refuse a recording whose losses or gradients are not those of the threads."""
        weights = self._window.current.weights
        for form in recording.forms:
            if dict(zip(form.names, form.weights, strict=True)) != weights:
                raise CannotTrace("its loss differs in form from one call to the next")
        found = [total for made, _ in recording.results for total in made]
        names = recording.forms[0].names
        eager = [t for made in zip(*(totals[n] for n in names), strict=True) for t in made]
        reasons = (
            differs(found, [t for t in eager if isinstance(t, Tensor)], "loss", sixteen_bit=True),
            differs(
                [gradient for _, gradient in recording.gradients],
                [gradient for gradient in wanted if gradient is not None],
                "gradient",
                sixteen_bit=self._sixteen_bit,
            ),
        )
        for reason in reasons:
            if reason is not None:
                raise CannotTrace(reason)

    def _give_up(self, reason: str) -> None:
        self._off = True
        self.forget()
        self.notes.fell_back("graph", "by threads", reason)


def _dtype(total: Tensor | float) -> torch.dtype:
    if not isinstance(total, Tensor) or total.dtype in _SIXTEEN_BIT:
        raise CannotTrace("its totals are 16-bit sums, whose seed changes with the first one")
    return total.dtype


def _static(tensor: Tensor, device: torch.device, *, on_host: bool) -> Tensor:
    """Return a copy of this tensor in memory that later inputs are copied into."""
    like = torch.empty_strided(
        tuple(tensor.shape),
        tensor.stride(),
        dtype=tensor.dtype,
        device="cpu" if on_host else device,
        pin_memory=on_host and device.type == "cuda",
    )
    return like.copy_(tensor)


class Tape(Protocol):
    """A recording of what `run` launches, which can be replayed."""

    def record(self, run: Callable[[], R], generators: Sequence[torch.Generator]) -> R: ...

    def replay(self) -> None: ...


class CudaTape:
    """A CUDA graph. Every replay overwrites the tensors that `run` returned."""

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def record(self, run: Callable[[], R], generators: Sequence[torch.Generator]) -> R:
        for generator in generators:
            self._graph.register_generator_state(generator)
        try:
            with capturing(self._graph, self._pool):  # Other threads launch into it too.
                return run()
        except BaseException:
            _reset_after_failed_capture(self._pool)
            raise

    def replay(self) -> None:
        self._graph.replay()


def _reset_after_failed_capture(pool: Any) -> None:
    """Reset the allocator and the generator: a failed capture leaves them in capture mode."""
    device = torch.cuda.current_device()
    with suppress(RuntimeError):
        torch.cuda.synchronize()
    with suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(device, pool)  # Raises if the capture did end.
        torch._C._cuda_releasePool(device, pool)
    with suppress(RuntimeError):
        blank = torch.cuda.CUDAGraph()
        number = torch.zeros(1, device="cuda")
        with capturing(blank, None):
            number.add_(1)
