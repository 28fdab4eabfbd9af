"""How a window adds up gradients and counts over the ranks: three ways, and one class per engine.

| class | autograd adds | the sum over the ranks is made | engines |
|---|---|---|---|
| `Local` | to the parameters | nowhere | a plain model, tensor parallelism |
| `ReducesAtClose` | to the parameters | at the close | DDP, gathered FSDP2, pipeline |
| `ReducesInLastBackward` | to the engine's tensors | in the last backward | FSDP2, DeepSpeed |

At the close a window calls `reduce`, finds the sums in `holders`, and asks `norm` for their norm.
DDP's sum starts in the last backward where it is known which that is.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from wholebatch.distributed.process_group import Group
from wholebatch.errors import RankError, WindowError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

OTHER_SETTINGS = (
    "ranks differ in their parameters (names, shapes, order, or which are frozen), learning "
    "rates, weight decay or clipping, so gradients of different parameters would be added, or the "
    "models would drift apart. Build, freeze and order the parameters in the same way on every "
    "rank (sort the names of a set), and step schedulers by a number that is the same on all "
    "ranks, such as step.loss"
)

Parameters: TypeAlias = Sequence[nn.Parameter]
Context: TypeAlias = AbstractContextManager[None]
_NOTHING_AROUND: Context = nullcontext()


class Sync(ABC):
    """One engine's way to add up gradients and counts over the data-parallel ranks."""

    adds_to_parameters: bool
    """True if autograd adds to the parameters themselves: `.grad` holds what an open window has
    added so far. Otherwise graphs lead to the engine's own tensors."""

    counts_must_agree: bool = False
    """True if every rank must run equally many forwards (collectives run inside of them)."""

    averaged_by: float = 1.0
    """The engine divides the reduced gradient by this; the seed of backward undoes it exactly."""

    owns_hooks: bool = False
    """True if the engine has put its own post-accumulate-grad hooks on the parameters."""

    owns_step: bool = False
    """True if the engine steps the optimizer itself."""

    clip_norm: float | None = None
    """A clipping set on the engine itself; the window does it in the engine's place."""

    replicas: Group | None = None
    """The ranks that hold the same numbers, and must start from the same; None if no two do."""

    def __init__(self, group: Group | None = None) -> None:
        self.group = group = group or Group()
        """The data-parallel ranks, whose batches together make the global batch."""
        self.peers: Group | None = group
        """The ranks that train the same parameters, whole or in slices; None if no two do."""
        self.ranks, self.rank = group.ranks, group.rank

    @property
    def runs_alone(self) -> bool:
        """True if a rank may run a forward or a backward that the other ranks do not run."""
        return self.adds_to_parameters and not self.counts_must_agree

    @property
    def takes_graphs(self) -> bool:
        """True if a micro-step may run as a graph, without autograd."""
        return self.runs_alone

    @property
    def reads_ahead(self) -> bool:
        """True if a loop must read a window's items before its first forward."""
        return not self.runs_alone

    @property
    def has_whole_gradient(self) -> bool:
        """True if `.grad` of this process is the gradient of the global batch, without a sum."""
        return self.ranks == 1 and self.adds_to_parameters

    # --------------------------------------------------------------- before a window

    def optimizer(self, optimizer: Any) -> Any:
        """Return the optimizer that steps the parameters, given the user's."""
        return optimizer

    def check(self, **options: Any) -> None:
        """Refuse options that this engine cannot keep exactly, at construction."""
        return

    def refuse_other_ranks(self, digest: int, parameters: Iterable[nn.Parameter]) -> None:
        """Refuse ranks with another digest of their settings, or that start from other weights."""
        if self.peers is not None and not self.peers.all_have(digest):
            raise RankError(OTHER_SETTINGS)
        if self.replicas is not None and not self.replicas.all_have(checksum(parameters)):
            raise RankError(
                "the weights differ between ranks, so the models would never be the same: load or "
                "initialise the same weights on every rank, or do so before you wrap the model "
                "(DistributedDataParallel copies the weights of rank 0 to all)"
            )

    def before_forwards(self) -> None:
        """Prepare for the forwards of a window, on all ranks; `restore` undoes it."""
        return

    def restore(self) -> None:
        """Put the engine's own switches back as they were found."""
        return

    def in_window(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter that the model holds now, for one of the optimizer's."""
        return parameter

    def stepped(self, parameters: Parameters) -> Parameters:
        """Return the optimizer's parameters, for those that a window trains."""
        return parameters

    # ------------------------------------------------------------------- in a window

    def begin(self, parameters: Parameters) -> None:
        """Note that a window opens."""
        return

    def backward(self, parameters: Parameters, *, last: bool) -> Context:
        """Return the context of one backward; `last` if it is known to be the window's last."""
        return _NOTHING_AROUND

    def run_backward(
        self, totals: Sequence[Tensor], seeds: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        """Run the backward of totals, times their seeds, into these inputs alone."""
        backward: Any = torch.autograd.backward
        if getattr(backward, "__globals__", {}).get("__name__") != "torch.autograd":
            backward(totals, seeds, inputs=inputs)  # a recorder has replaced it, to see all
            return
        # What torch.autograd.backward calls: its checks of arguments take as long as a small layer.
        run: Any = torch.autograd.graph._engine_run_backward
        if totals[0].is_cpu and inputs[0].is_cpu:  # no threads of devices, which need a context
            run = torch.autograd.Variable._execution_engine.run_backward
        run(
            tuple(totals),
            tuple(seeds),
            False,
            False,
            tuple(inputs),
            allow_unreachable=True,
            accumulate_grad=True,
        )

    # ------------------------------------------------------------------ at the close

    @abstractmethod
    def reduce(self, parameters: Parameters) -> Collection[int]:
        """Let `holders` hold the sums over the ranks, where the last backward has not done so.

        Return the ids of the optimizer's parameters that had no gradient on this rank.
        """

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm over all gradients; every rank gets the same number."""
        if gradients and all(
            type(gradient) is Tensor
            and gradient.dtype is gradients[0].dtype
            and gradient.device == gradients[0].device
            for gradient in gradients
        ):  # the same as get_total_norm, without its grouping
            norms = torch.stack(torch._foreach_norm(list(gradients)))
            norm: Tensor = torch.linalg.vector_norm(norms)
            return norm
        return torch.nn.utils.get_total_norm(gradients)

    def holders(self, groups: Sequence[Sequence[nn.Parameter]]) -> Sequence[Sequence[Any]]:
        """Return the objects whose `.grad` holds the reduced gradients, by parameter group."""
        return [self.stepped(group) for group in groups]

    def after_update(self) -> None:
        """Synchronise the buffers of all ranks after an update."""
        return

    def discard(self) -> None:
        """Drop the engine's own state of a window that is over."""
        return


class Local(Sync):
    """The gradients of this process are those of the global batch."""

    adds_to_parameters = True

    def reduce(self, parameters: Parameters) -> Collection[int]:
        return ()


class ReducesAtClose(Sync):
    """Every rank has whole gradients of its own micro-batches, and the close adds them up."""

    adds_to_parameters = True


class ReducesInLastBackward(Sync):
    """The engine reduces inside a backward, so the window's last one must be known before."""

    adds_to_parameters = False
    counts_must_agree = True
    engine_name: str
    """The engine's name, for messages."""
    _is_reduced = False

    def begin(self, parameters: Parameters) -> None:
        self._is_reduced = False

    @contextmanager
    def backward(self, parameters: Parameters, *, last: bool) -> Iterator[None]:
        self.switch(last=last)
        yield
        self._is_reduced = last

    @abstractmethod
    def switch(self, *, last: bool) -> None:
        """Tell the engine whether the next backward is the window's last."""

    def reduce(self, parameters: Parameters) -> Collection[int]:
        if not self._is_reduced:
            raise WindowError(
                f"{self.engine_name} reduces gradients inside a backward, and this window has no "
                "backward left. Call backward for every micro-batch (with loss * 0 and units=0 for "
                "one that does not count), and let over() find the last one instead of calling "
                "flush()"
            )
        return ()


def checksum(parameters: Iterable[nn.Parameter]) -> int:
    """Return a number that changes with the bits of these parameters, on every device alike."""
    sums = []
    for parameter in parameters:
        bits = getattr(parameter, "to_local", lambda whole=parameter: whole)().detach()
        try:
            bits = torch.view_as_real(bits) if bits.is_complex() else bits
            bits = bits.view(_BITS[bits.element_size()])
            sums.append(bits.sum(dtype=torch.int64))
        except (RuntimeError, TypeError, NotImplementedError):  # a tensor of a kind of its own
            continue
    return zlib.crc32(repr([int(each) for each in sums]).encode())
