"""Exact BatchNorm: micro-batches that meet at every BatchNorm.

Every micro-batch runs forward and backward in its own thread, one awake at a time. At a
training-mode BatchNorm it leaves its moments and sleeps until all others have left theirs. Then
each normalises with the moments of the whole batch. The backward pass meets at the same layers for
its two sums. The gradient and the running statistics are those of the undivided batch: this is
SyncBatchNorm with micro-batches in place of ranks.

```python
step = LockStep(model)
losses = step.run(
    micros,
    forward=lambda micro: loss_fn(model, micro),     # called in the order of the micro-batches
    backward=lambda loss: loss.total.backward() or loss.total.detach(),
)
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wholebatch.batch.samples import flatten
from wholebatch.compile.captured_state import version_of
from wholebatch.coupled.batchnorm.activation_offload import (
    ActivationPages,
    HostPool,
    LearnedUse,
    Traffic,
    WatchedOperations,
)
from wholebatch.coupled.batchnorm.caller_thread_kernels import (
    CallerThreadLayers,
    below_autograd,
    execute_on_caller,
)
from wholebatch.coupled.batchnorm.turn_taking_threads import (
    RecordedStreams,
    Streams,
    TurnTakingThreads,
)
from wholebatch.coupled.batchnorm.whole_batch_norm import Reduce, WholeBatchNorms, recomputing
from wholebatch.coupled.normalisation_layers import (
    batchnorms,
    replace_forward,
    running_buffers,
    tracked_instance_norms,
    uses_batch_statistics,
)
from wholebatch.errors import OptionError

M = TypeVar("M")
T = TypeVar("T")
R = TypeVar("R")

Hold = Literal["graphs", "inputs", "host"]
_Work = tuple[Sequence[Any], Callable[[Any], Any], Callable[[Any], Any]]
"""The micro-batches, and the forward and the backward of each."""
_LESS: dict[Hold, Hold] = {"graphs": "inputs", "inputs": "host"}


class LockStep:
    """Runs windows whose BatchNorms use the statistics of the undivided batch.

    These are all BatchNorms of `model`, and its InstanceNorms with running statistics. Every call
    checks which of them use batch statistics, so layers in evaluation mode are left alone. `reduce`
    sums a tensor over data-parallel ranks; with it the statistics, and the gradients through them,
    are those of the global batch.

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

    `waits()` is called when a micro-batch sleeps in its backward: the loss of another may follow.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        reduce: Reduce | None = None,
        hold: Hold | Literal["auto"] = "graphs",
        blocks: Sequence[tuple[str, nn.Module]] = (),
        least_page: int = 1 << 16,
        waits: Callable[[], None] = lambda: None,
    ) -> None:
        if hold != "auto" and hold not in get_args(Hold):
            raise OptionError(f'hold="{hold}": must be "graphs", "inputs", "host" or "auto"')
        if hold in ("inputs", "auto"):
            blocks = blocks or blocks_of(model)
        if hold == "inputs" and not blocks:
            raise OptionError(
                'hold="inputs": this model has no blocks to compute again (modules with BatchNorms '
                "inside, each with at most half of all): put some of its layers into modules of "
                'their own, or use hold="graphs", "host" or "auto"'
            )
        self._norms = (*batchnorms(model), *tracked_instance_norms(model))
        self._reduce = reduce
        self._auto = hold == "auto"
        self.holding: Hold = "graphs" if hold == "auto" else hold
        self._blocks = tuple(blocks)
        self._model = model
        self._least_page = least_page
        self._pool: HostPool | None = None
        self.recorded_pools: list[HostPool] = []  # host memory of recordings that are replayed
        self._learned = LearnedUse()
        self.traffic: Traffic | None = None  # Of the last run with hold="host".
        self._kept_blocks: frozenset[str] = frozenset()  # Known after the first run.
        self._changing: set[str] = set()  # Blocks whose input is changed in place.
        self.drawn = frozenset({"cpu"})  # Devices whose random numbers the last run drew.
        self.seed = 0  # The seed of the last run's random numbers.
        self._waits = waits

    def is_needed(self) -> bool:
        """True if a layer would use the statistics of its batch now."""
        return any(uses_batch_statistics(module) for _, module in self._norms)

    def begin_with(self, hold: Hold) -> None:
        """Set what "auto" holds from here on; it still holds less if that does not fit."""
        if self._auto:
            self.holding = hold

    def run(
        self,
        micros: Sequence[M],
        *,
        forward: Callable[[M], T],
        backward: Callable[[T], R],
        free_memory: Callable[[], bool] = lambda: False,
    ) -> list[R]:
        """Run the micro-batches and return the results of `backward`, in order.

        For each micro-batch `backward(forward(micro))` is called on its thread. The threads have
        the caller's autocast, gradient mode, devices, streams and context variables. Each has its
        own stream of random numbers. Between two BatchNorms, gradients are added in the order of
        the micro-batches, the same on every run. If memory runs out, `free_memory()` is called
        first, and returns True if it freed any.

        If anything fails, all micro-batches end, running statistics and random state are restored,
        and the exception is raised unchanged. What was already added to `.grad` stays: the caller
        decides whether to discard it.
        """
        if not micros:
            return []
        while True:
            backwards = _Backwards(self._waits)
            try:
                return self._attempt((micros, forward, backward), backwards)
            except BlockInputChanged:
                continue
            except torch.OutOfMemoryError:
                if not (free_memory() or self._hold_less()) or backwards.begun:
                    raise
            # Outside of the handler: the traceback, which held every tensor, is gone.
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    def _hold_less(self) -> bool:
        """Switch to the next way of holding; return False if there is none."""
        if not self._auto or self.holding == "host":
            return False
        self.holding = _LESS[self.holding]
        if self.holding == "inputs" and not self._blocks:
            self.holding = "host"
        return True

    def _attempt(self, work: _Work, backwards: _Backwards) -> list[Any]:
        """Run once; after a failure, restore the running statistics and the random state."""
        parties = len(work[0])
        streams = Streams(parties, self._devices()) if parties > 1 else None
        found = [
            (buffer, buffer.detach().clone())
            for _, module in self._norms
            for buffer in running_buffers(module).values()
            if not nn.parameter.is_lazy(buffer)
        ]
        try:
            results = self._run(work, streams=streams, backwards=backwards)
        except BaseException:
            with torch.no_grad():
                for buffer, before in found:
                    buffer.copy_(before)
            if streams is not None:
                streams.rewind()
            raise
        if streams is not None:
            streams.close()
            self.drawn, self.seed = streams.drawn(), streams.seed
        return results

    # ---------------------------------------------------------------- capture

    def recorded_streams(self, parties: int) -> RecordedStreams | None:
        """Return the random streams for a recording of the last run, or None if it drew none."""
        if not self.drawn:
            return None
        device = next(device for device in self._devices() if device.type == "cuda")
        return RecordedStreams(parties, device)

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
        recording. A capture computes nothing, so nothing has to be restored after a failure.
        """
        pool = self._pool or HostPool(pinned=self._on_cuda())
        self._pool = None  # A later run uses another pool.
        pool.forget_copies()
        self.recorded_pools.append(pool)
        try:
            return self._run((micros, forward, backward), streams=streams, pool=pool)
        finally:
            if streams is not None:
                streams.close()

    # ---------------------------------------------------------------- threads

    def _run(
        self,
        work: _Work,
        *,
        streams: Streams | RecordedStreams | None,
        pool: HostPool | None = None,
        backwards: _Backwards | None = None,
    ) -> list[Any]:
        """Run every micro-batch in a thread of its own, and let them meet at the BatchNorms.

        With `pool`, the host memory of a recording, the run is captured.
        """
        micros, forward, backward = work
        parties = len(micros)
        pages = self._pages(parties, pool)
        states = [state for state in (backwards, streams, pages) if state is not None]
        threads = TurnTakingThreads[Any](parties, states, around=below_autograd)
        on_caller = parties > 1 and self._has_thread_state()
        execute = execute_on_caller(threads) if on_caller else None
        recomputed = RecomputedBlocks(
            self._blocks if self.holding == "inputs" else (),
            kept=self._kept_blocks,
            changing=self._changing,
            draws=pool is None,
        )

        def body(party: int) -> Any:
            with nullcontext() if pages is None else WatchedOperations(pages, execute):
                result = forward(micros[party])
                recomputed.check()
                if backwards is not None:
                    backwards.begun.add(party)
                value = backward(result)
                del result
            if streams is not None:
                streams.leave(party)
            if pages is not None:
                pages.finish(party)
            return value

        layers = CallerThreadLayers(self._model.modules() if on_caller else (), threads, pages)
        norms = WholeBatchNorms(self._norms, threads, reduce=self._reduce)
        try:
            with norms, recomputed, layers:
                results = threads.run(body)
        finally:
            if pages is not None:
                self.traffic = pages.close()
        if not self._kept_blocks:
            self._kept_blocks = recomputed.worth_keeping(parties, norms.sizes)
        return results

    def _pages(self, parties: int, pool: HostPool | None) -> ActivationPages | None:
        """Return the pages of a run that holds activations on the host, or None."""
        if self.holding != "host" or parties == 1:
            return None
        if pool is None:
            pool = self._pool = self._pool or HostPool(pinned=self._on_cuda())
        return ActivationPages(
            parties,
            pool=pool,
            kind="cuda" if self._on_cuda() else "cpu",
            parameters=self._model.parameters(),
            learned=self._learned,
            least=self._least_page,
        )

    def _has_thread_state(self) -> bool:
        return self._on_cuda()

    def _on_cuda(self) -> bool:
        return any(device.type == "cuda" for device in self._devices())

    def _devices(self) -> set[torch.device]:
        found = {
            tensor.device
            for _, module in self._norms
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        }
        if torch.cuda.is_initialized():
            found.add(torch.device("cuda", torch.cuda.current_device()))
        return found


@dataclass
class _Backwards:
    """The micro-batches whose backward has begun; `waits` is called when one goes to sleep."""

    waits: Callable[[], None]
    begun: set[int] = field(default_factory=set)

    def enter(self, party: int) -> None:
        return

    def leave(self, party: int) -> None:
        if party in self.begun:
            self.waits()


# --------------------------------------------------------------------- recomputed blocks

_MOST_NORMS = 8
_SMALL = 0.05
"""The fraction of a model's activations that may be kept in blocks at its end."""


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the parts of a model that are worth recomputing as a whole, with their names.

    These are the largest modules with at most 8 BatchNorms, and at most half of all, that are not
    just a sequence of such modules: the bottlenecks of a ResNet, the layers of a DenseNet, the
    stages of a U-Net.

    >>> layer = lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    >>> [name for name, _ in blocks_of(nn.Sequential(layer(), layer(), nn.Linear(4, 2)))]
    ['0', '1']
    """
    found: list[tuple[str, nn.Module]] = []
    most = min(_MOST_NORMS, max(1, len(batchnorms(model)) // 2))

    def look(name: str, module: nn.Module) -> None:
        norms = batchnorms(module)
        if not norms or norms[0][1] is module:
            return
        composite = [
            child for child in module.children() if batchnorms(child) and any(child.children())
        ]
        sequence = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
        whole = not (sequence and len(composite) > 1) and len(norms) <= most
        if name and whole and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            found.append((name, module))
            return
        for child_name, child in module.named_children():
            look(f"{name}.{child_name}" if name else child_name, child)

    look("", model)
    return found


class BlockInputChanged(Exception):
    """Raised when a block's input was changed in place and no copy of it was kept."""


@dataclass(eq=False)
class RecomputedBlocks:
    """A context in which the given blocks keep only their inputs, and are computed again.

    Lock-step holds the activations of the whole batch. With blocks it holds only their inputs, and
    the inside of the block that is being computed. A ResNet-50 needs about a third of the memory
    and a third more time, and nothing is copied to the host.

    Blocks in `kept` keep everything; `worth_keeping` names some after a run. Without `draws`, as in
    a run that is captured, blocks draw no random numbers, and the generators are left alone.

    A block is recomputed with its first arguments, even if a list among them has grown since. If a
    tensor among them was changed in place, by the block or later, `check` raises an error and adds
    the block's name to `changing`. For these blocks a copy of the input is kept.
    """

    blocks: Sequence[tuple[str, nn.Module]]
    _: KW_ONLY
    kept: frozenset[str]
    changing: set[str]
    draws: bool
    _watched: list[tuple[str, Tensor, int]] | None = field(default_factory=list)
    _calls: dict[str, int] = field(default_factory=dict)
    _replaced: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> RecomputedBlocks:
        for name, block in self.blocks:
            if name not in self.kept:
                replace_forward(self._replaced, block, self._checkpointed(name, block.forward))
        return self

    def __exit__(self, *error: object) -> None:
        self._replaced.close()

    def check(self) -> None:
        """Raise `BlockInputChanged` if one has; call before the first backward."""
        watched, self._watched = self._watched or [], None
        found = {name for name, tensor, then in watched if version_of(tensor) != then}
        if found:
            self.changing |= found
            raise BlockInputChanged

    def worth_keeping(self, micro_batches: int, sizes: Mapping[str, int]) -> frozenset[str]:
        """Return the blocks at the end of the forward that are cheap to keep.

        The last block runs first in the backward, where it would be recomputed at once: keeping it
        costs nothing. Those before it are kept as long as the `sizes` of their layers stay small.
        """
        found: set[str] = set()
        left = _SMALL * sum(sizes.values())
        for name in reversed(self._calls):
            if self._calls[name] != micro_batches:
                break  # Called more than once, or not by every micro-batch.
            inside = sum(size for layer, size in sizes.items() if layer.startswith(f"{name}."))
            left -= inside if found else 0
            if left < 0:
                break
            found.add(name)
        return frozenset(found)

    def _checkpointed(self, name: str, found: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not recomputing():
                self._calls[name] = self._calls.get(name, 0) + 1
            given = _BlockCall(found, args, kwargs, copies=name in self.changing)
            if self._watched is not None and name not in self.changing:
                self._watched += [(name, tensor, version_of(tensor)) for tensor in given.tensors]
            return checkpoint(
                given, *given.take_tensors(), use_reentrant=False, preserve_rng_state=self.draws
            )

        return forward


class _BlockCall:
    """A call of a block that can be repeated with the same arguments."""

    def __init__(self, block: Callable[..., Any], args: Any, kwargs: Any, *, copies: bool) -> None:
        self._block = block
        self._copies = copies
        leaves, structure = flatten((args, kwargs))
        values = [leaf.value for leaf in leaves]
        # Rebuild the containers: the caller may change its own later.
        _, self._structure = flatten(structure.build(values))
        self._values = [None if isinstance(value, Tensor) else value for value in values]
        self._places = [at for at, value in enumerate(values) if isinstance(value, Tensor)]
        self.tensors: list[Tensor] = [values[at] for at in self._places]
        self._first: tuple[Any, Any] | None = (args, kwargs)

    def take_tensors(self) -> list[Tensor]:
        """Return the tensors, or copies of them, and stop holding them here."""
        tensors, self.tensors = self.tensors, []
        return [self._copied(tensor) for tensor in tensors]

    def _copied(self, tensor: Tensor) -> Tensor:
        return tensor.clone() if self._copies else tensor

    def __call__(self, *tensors: Tensor) -> Any:
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
        else:
            values = list(self._values)
            for at, tensor in zip(self._places, tensors, strict=True):
                values[at] = self._copied(tensor)
            args, kwargs = self._structure.build(values)
        return self._block(*args, **kwargs)
