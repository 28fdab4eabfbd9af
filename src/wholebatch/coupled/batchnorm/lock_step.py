"""Exact BatchNorm: micro-batches that meet at every BatchNorm.

Every micro-batch runs forward and backward in its own thread, one awake at a time. At a
training-mode BatchNorm it leaves its moments and sleeps until all others have left theirs. Then
each normalises with the moments of the whole batch. The backward pass meets at the same layers for
its two sums. The gradient and the running statistics are those of the undivided batch: this is
SyncBatchNorm with micro-batches in place of ranks.

```python
step = LockStep(batchnorms(model))
losses = step.run(
    micros,
    forward=lambda micro: loss_fn(model, micro),     # called in the order of the micro-batches
    backward=lambda loss: loss.total.backward() or loss.total.detach(),
)
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from wholebatch.coupled.batchnorm.activation_offload import HostPool, Learnt, Paged, Pages
from wholebatch.coupled.batchnorm.caller_thread_kernels import (
    Elsewhere,
    Execute,
    OneThread,
    below_autograd,
    executor,
    ignored,
)
from wholebatch.coupled.batchnorm.moments import Reduce
from wholebatch.coupled.batchnorm.recomputed_blocks import BeginAgain, Recomputed, blocks_of
from wholebatch.coupled.batchnorm.turn_taking_threads import Baton, Inherited
from wholebatch.coupled.batchnorm.whole_batch_norm import Meetings
from wholebatch.coupled.normalisation_layers import running_buffers
from wholebatch.coupled.random_streams import Begins, Call, RecordedStreams, Streams
from wholebatch.errors import OptionError

__all__ = ["LockStep"]

M = TypeVar("M")
T = TypeVar("T")
R = TypeVar("R")


Hold = Literal["graphs", "inputs", "host"]
_LESS: dict[Hold, Hold] = {"graphs": "inputs", "inputs": "host"}


class LockStep:
    """A runner of windows whose BatchNorms use the statistics of the undivided batch.

    `norms` are the layers to make exact, with their names for errors: BatchNorms, and InstanceNorms
    with running statistics. Every call checks which of them use batch statistics, so layers in
    evaluation mode are left alone. `reduce` sums a tensor over data-parallel ranks; with it the
    statistics, and the gradients through them, are those of the global batch.

    All micro-batches are alive at once. `hold` sets which of their tensors stay on the device:

    - `"graphs"`: everything, as for the undivided batch. This is the fastest, if it fits.
    - `"inputs"`: the inputs of each of `blocks` (by default those of `blocks_of(model)`). Blocks
      are recomputed in the backward pass. Nothing is copied to the host.
    - `"host"`: the tensors of the micro-batch that is awake. The rest waits in host memory, so the
      device needs the same memory for any number of micro-batches, and the link to the host is
      busy. Only operations that PyTorch dispatches may touch a tensor: a kernel launched on a raw
      pointer would find no data there.
    - `"auto"`: the first of these that fits. If memory runs out, less is held from then on: at once
      if no backward had begun; else the error is raised, and the next run holds less. `holding` is
      the current choice.

    Pass the `model`: on CUDA its convolutions are then fastest, and the gradients of its parameters
    stay on the device.
    """

    def __init__(
        self,
        norms: Sequence[tuple[str, nn.Module]],
        *,
        model: nn.Module | None = None,
        reduce: Reduce | None = None,
        hold: Hold | Literal["auto"] = "graphs",
        blocks: Sequence[tuple[str, nn.Module]] = (),
        least_page: int = 1 << 16,
    ) -> None:
        if hold != "auto" and hold not in get_args(Hold):
            raise OptionError(f'hold="{hold}": must be "graphs", "inputs", "host" or "auto"')
        if hold in ("inputs", "auto") and model is not None:
            blocks = blocks or blocks_of(model)
        if hold == "inputs" and not blocks:
            raise OptionError(
                'hold="inputs": this model has no blocks to compute again (modules with BatchNorms '
                "inside, each with at most half of all): put some of its layers into modules of "
                'their own, or use hold="graphs", "host" or "auto"'
            )
        self._norms = tuple(norms)
        self._reduce = reduce
        self._auto = hold == "auto"
        self.holding: Hold = "graphs" if hold == "auto" else hold
        self._blocks = tuple(blocks)
        self._model = model
        self._least_page = least_page
        self._pool: HostPool | None = None
        self._recorded_pools: list[HostPool] = []
        self._learnt = Learnt()
        self.paged: Paged | None = None
        self._kept_blocks: frozenset[str] = frozenset()  # Known after the first run.
        self._changing: set[str] = set()  # Blocks whose input is changed in place.
        self.drawn = frozenset({"cpu"})  # Devices whose random numbers the last run drew.
        self.seed = 0  # The seed of the last run's random numbers.
        self._begins: dict[Call, int] = {}
        self.relieve: Callable[[], bool] = lambda: False  # Frees memory; True if there was any.
        self.waits: Callable[[], None] = lambda: None  # A backward waits: another loss may follow.

    def run(
        self,
        micros: Sequence[M],
        *,
        forward: Callable[[M], T],
        backward: Callable[[T], R],
        moved: Callable[[M], M] | None = None,
    ) -> list[R]:
        """Run the micro-batches and return the results of `backward`, in order.

        For each micro-batch `backward(forward(moved(micro)))` is called on its thread. The threads
        have the caller's autocast, gradient mode, devices, streams and context variables. Each has
        its own stream of random numbers. Between two BatchNorms, gradients are added in the order
        of the micro-batches, the same on every run.

        If anything fails, all micro-batches end, running statistics and random state are restored,
        and the exception is raised unchanged. What was already added to `.grad` stays: the caller
        decides whether to discard it.
        """
        if not micros:
            return []
        begun: list[bool] = []

        def noted(result: T) -> R:
            begun.append(True)
            return backward(result)

        while True:
            try:
                return self._run(micros, forward, noted, moved)
            except BeginAgain:
                continue
            except torch.OutOfMemoryError:
                if not (self.relieve() or self._hold_less()) or begun:
                    raise
            # Outside of the handler: the traceback, which held every tensor, is gone.
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    def begin_with(self, hold: Hold) -> None:
        """Set what "auto" holds from here on; it still holds less if that does not fit."""
        if self._auto:
            self.holding = hold

    def _hold_less(self) -> bool:
        """Switch to the next way of holding; return False if there is none."""
        if not self._auto or self.holding == "host":
            return False
        self.holding = _LESS[self.holding]
        if self.holding == "inputs" and not self._blocks:
            self.holding = "host"
        return True

    def recorded_streams(self, parties: int) -> RecordedStreams | None:
        """Return the random streams for a recording of the last run, or None if it drew none."""
        if not self.drawn:
            return None
        device = next(device for device in self._devices() if device.type == "cuda")
        return RecordedStreams(parties, device, self._begins)

    def record(
        self,
        micros: Sequence[M],
        *,
        forward: Callable[[M], T],
        backward: Callable[[T], R],
        streams: RecordedStreams | None,
    ) -> list[R]:
        """Do the same as `run` while a CUDA graph is captured on the current stream.

        A run of the same kind must come just before, so that everything created once exists. Random
        numbers come from `streams`. From here on, the host memory of `hold="host"` belongs to the
        recording.
        """
        pool = self._pool or HostPool(pinned=self._on_cuda())
        self._pool = None  # A later run uses another pool.
        pool.forget_copies()
        self._recorded_pools.append(pool)
        return self._run(micros, forward, backward, None, pool=pool, recorded=streams or True)

    def forget_recordings(self) -> None:
        """Free the host memory of all recordings, once none of them will be replayed."""
        self._recorded_pools.clear()

    def _run(
        self,
        micros: Sequence[M],
        forward: Callable[[M], T],
        backward: Callable[[T], R],
        moved: Callable[[M], M] | None,
        *,
        pool: HostPool | None = None,
        recorded: RecordedStreams | bool = False,
    ) -> list[R]:
        parties = len(micros)
        devices = () if recorded else self._devices()
        streams = Streams(parties, devices) if parties > 1 else None
        on_tape = recorded if isinstance(recorded, RecordedStreams) else None
        pages = self._pages(parties, pool) if self.holding == "host" and parties > 1 else None
        parts = [part for part in (streams, on_tape, pages) if part is not None]
        going_back: set[int] = set()

        def leave(party: int) -> None:
            if party in going_back:
                self.waits()
            for part in parts:
                part.leave(party)

        baton: Baton[R] = Baton(
            parties,
            enter=lambda party: [part.enter(party) for part in parts],
            leave=leave,
            around=below_autograd,
        )
        elsewhere = parties > 1 and self._has_thread_state()
        by_layers = elsewhere and self._model is not None
        execute: Execute | None = None
        if elsewhere and (pages is not None or not by_layers):
            execute = executor(baton.call)
        if pages is not None:
            execute = pages.watch(execute or _here)
        inherited = Inherited.of_this_thread()
        begins = Begins(self._offset, lambda: baton.party) if elsewhere or recorded else None
        recomputed = Recomputed(
            self._blocks if self.holding == "inputs" else (),
            kept=self._kept_blocks,
            changing=self._changing,
            begins=begins,
            again=on_tape.again if on_tape is not None else _same if recorded else None,
        )

        def body(party: int) -> R:
            with nullcontext() if execute is None else OneThread(execute):
                micro = micros[party] if moved is None else moved(micros[party])
                result = forward(micro)
                del micro
                recomputed.check()
                if not recorded:
                    going_back.add(party)
                value = backward(result)
                del result
            if streams is not None:
                streams.leave(party)
            if pages is not None:
                pages.finish(party)
            return value

        def threaded(party: int) -> Callable[[], R]:
            return lambda: inherited.run(lambda: body(party))

        # A capture computes nothing, so nothing has to be restored.
        buffers = _Buffers(() if recorded else self._norms)
        try:
            with (
                Meetings(self._norms, baton, reduce=self._reduce) as meetings,
                recomputed,
                Elsewhere(
                    self._model.modules() if by_layers and self._model else (),
                    # A dispatch mode already hands these operations over, if there is one.
                    baton.call if execute is None else _at_once,
                    party=lambda: baton.party,
                    parties=parties,
                    keep=ignored if pages is None else pages.keep,
                    keep_sum=ignored if pages is None else pages.keep_sum,
                ),
            ):
                results = baton.run([threaded(party) for party in range(parties)])
        except BaseException:
            buffers.restore()
            if streams is not None:
                streams.rewind()
            raise
        finally:
            if pages is not None:
                self.paged = pages.close()
            if on_tape is not None:
                on_tape.close()
        if not self._kept_blocks:
            self._kept_blocks = recomputed.worth_keeping(parties, meetings.sizes)
        if streams is not None:
            streams.close()
        if streams is not None and not recorded:
            self.drawn, self.seed = streams.drawn(), streams.seed
            self._begins = {} if begins is None else begins.of
        return results

    def _offset(self) -> int:
        """Return the offset of the device's random generator."""
        if not self._on_cuda():
            return 0
        return int(torch.cuda.default_generators[torch.cuda.current_device()].get_offset())

    def _has_thread_state(self) -> bool:
        return self._on_cuda()

    def _on_cuda(self) -> bool:
        return any(device.type == "cuda" for device in self._devices())

    def _pages(self, parties: int, pool: HostPool | None) -> Pages:
        if pool is None:
            pool = self._pool = self._pool or HostPool(pinned=self._on_cuda())
        return Pages(
            parties,
            pool=pool,
            kind="cuda" if self._on_cuda() else "cpu",
            parameters=() if self._model is None else self._model.parameters(),
            learnt=self._learnt,
            least=self._least_page,
        )

    def _devices(self) -> set[torch.device]:
        found = {
            tensor.device
            for _, module in self._norms
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        }
        if torch.cuda.is_initialized():
            found.add(torch.device("cuda", torch.cuda.current_device()))
        return found


def _here(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _same(call: Call) -> AbstractContextManager[None]:
    return nullcontext()


def _at_once(job: Callable[[], T]) -> T:
    return job()


class _Buffers:
    """A copy of the running statistics, to restore if a window fails."""

    def __init__(self, norms: Sequence[tuple[str, nn.Module]]) -> None:
        self._saved: list[tuple[Tensor, Tensor]] = [
            (buffer, buffer.detach().clone())
            for _, module in norms
            for buffer in running_buffers(module).values()
            if not nn.parameter.is_lazy(buffer)
        ]

    def restore(self) -> None:
        with torch.no_grad():
            for buffer, saved in self._saved:
                buffer.copy_(saved)
