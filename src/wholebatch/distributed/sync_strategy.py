"""What a window asks of the engine that moves gradients between ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from wholebatch.distributed.rank_progress import Progress

__all__ = ["Sync"]


class Sync(ABC):
    """One engine's way to add up gradients and counts over the data-parallel ranks."""

    ranks: int = 1
    """Data-parallel ranks whose batches together make the global batch."""

    rank: int = 0
    """Which of them this process is."""

    averaged_by: float = 1.0
    """What the engine divides the reduced gradient by; the seed of backward undoes it exactly."""

    counts_must_agree: bool = False
    """Whether every rank must run equally many forwards (collectives run inside of them)."""

    keeps_gradients: bool = True
    """Whether the gradients of an open window are in `.grad`, where a checkpoint can take them."""

    grows_own_graph: bool = False
    """Whether graphs lead to the engine's own tensors instead of the parameters themselves."""

    takes_graphs: bool = False
    """Whether a micro-step may run as a graph, without autograd: what it adds into `.grad` is
    reduced at the close."""

    same_parameters: bool = True
    """Whether all ranks hold the same parameters, whole or in slices."""

    owns_hooks: bool = False
    """Whether the engine has put its own post-accumulate-grad hooks on the parameters."""

    owns_step: bool = False
    """True if the engine steps the optimizer itself."""

    clip_norm: float | None = None
    """A clipping set on the engine itself; the window does it in the engine's place."""

    policy: str = "one process: nothing to reduce"
    """What is done when, and why, in a sentence."""

    def optimizer(self, optimizer: Any) -> Any:
        """What steps the parameters, given what the user passed as `optimizer`."""
        return optimizer

    def check(self, **options: Any) -> None:
        """Refuse options that this engine cannot keep exactly, at construction."""
        return

    @property
    def progress(self) -> Progress | None:
        """Where the marks of this rank's way go, by which the others know that it is not stuck."""
        if self.ranks == 1:
            return None
        from wholebatch.distributed.rank_failure import alarm

        return alarm().progress

    def failures(self) -> AbstractContextManager[None]:
        """Tell an engine's collective that failed by the rank that made it fail."""
        if self.ranks == 1:
            return nullcontext()
        from wholebatch.distributed.rank_failure import alarm

        return alarm().failures()

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """A window opens."""
        if self.progress is not None:
            self.progress.begin()

    def run_backward(self, totals: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
        """The backward of an engine that `grows_own_graph`."""
        torch.autograd.backward(totals, seeds)

    @abstractmethod
    def backward(
        self, parameters: Sequence[nn.Parameter], *, reduces: bool, overlap: bool = True
    ) -> AbstractContextManager[None]:
        """The context of one backward; when it is left, a backward that reduces has reduced."""

    @abstractmethod
    def reduce_now(self, parameters: Sequence[nn.Parameter]) -> None:
        """Reduce gradients that no backward has reduced (a flush, a skipped last micro-batch)."""

    def waited(self) -> float | None:
        """Seconds so far that this rank has waited for others; None where the engine hides it."""
        return None

    def filled_in(self) -> set[int]:
        """Parameters (by id) that had no gradient on this rank at the last reduction."""
        return set()

    @abstractmethod
    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks, in float64, in one small collective."""

    @abstractmethod
    def sum_tensor(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over the ranks, as a new tensor."""

    @abstractmethod
    def largest(self, value: Tensor) -> Tensor:
        """The largest over the ranks of a number that is on the device; stays there."""

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm over all gradients; every rank gets the same number."""
        if gradients and all(
            type(gradient) is Tensor
            and gradient.dtype is gradients[0].dtype
            and gradient.device == gradients[0].device
            for gradient in gradients
        ):  # what get_total_norm comes to, without its grouping
            norms = torch.stack(torch._foreach_norm(list(gradients)))
            norm: Tensor = torch.linalg.vector_norm(norms)
            return norm
        return torch.nn.utils.get_total_norm(gradients)

    def holders(self, groups: Sequence[Sequence[nn.Parameter]]) -> Sequence[Sequence[Any]]:
        """What holds the reduced gradients in `.grad` at the close, by parameter group."""
        return groups

    def after_update(self) -> None:
        """The window is closed: bring into line what is not a parameter (buffers)."""
        return

    def discard(self) -> None:
        """Drop what the engine itself holds of a window that is over."""
        if self.progress is not None:
            self.progress.end()

    def restore(self) -> None:
        """Leave the engine's own switches as they were found."""
        if self.progress is not None:
            self.progress.pause()
