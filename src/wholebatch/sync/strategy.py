"""What a window asks of the engine that moves gradients between ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wholebatch.errors import UnsupportedError

__all__ = ["Sync", "choose"]


class Sync(ABC):
    """The four things a window needs; a class per engine says how."""

    ranks: int = 1
    """Data-parallel ranks whose batches together make the global batch."""

    averaged_by: int = 1
    """What the engine divides the reduced gradient by; the seed of backward undoes it exactly."""

    @abstractmethod
    def next_backward_reduces(self, reduces: bool) -> None:
        """Set before the forward: whether the backward that follows reduces the gradients."""

    @abstractmethod
    def restore(self) -> None:
        """Leave the engine's own switches as they were found."""

    @abstractmethod
    def reduce_now(self, parameters: Sequence[nn.Parameter]) -> None:
        """Reduce gradients that no backward has reduced (a flush, a skipped last micro-batch)."""

    @abstractmethod
    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks, in float64, in one small collective."""

    @abstractmethod
    def largest(self, value: Tensor) -> Tensor:
        """The largest over the ranks of a number that is on the device; stays there."""


def choose(model: nn.Module | Sequence[nn.Module]) -> Sync:
    """The strategy for the engine that this model is wrapped in."""
    from wholebatch.sync.single import Single

    for module in [model] if isinstance(model, nn.Module) else model:
        for part in module.modules():
            kind = type(part)
            if kind.__module__.startswith("deepspeed") or isinstance(
                part, nn.parallel.DistributedDataParallel
            ):
                raise _unknown(kind)
        if _is_fully_sharded(module):
            raise _unknown(type(module))
    return Single()


def _is_fully_sharded(module: nn.Module) -> bool:
    return any(
        kind.__name__ in ("FSDPModule", "FullyShardedDataParallel") for kind in type(module).__mro__
    ) or any(isinstance(parameter, _dtensor()) for parameter in module.parameters())


def _dtensor() -> type:
    if torch.distributed.is_available():
        from torch.distributed.tensor import DTensor

        return DTensor
    return type(None)


def _unknown(kind: type) -> UnsupportedError:
    return UnsupportedError(
        f"model wrapped in {kind.__name__}: only single-process modules are supported in this "
        "version; pass the plain nn.Module (an unknown engine would reduce or average the "
        "gradients behind the window's back)"
    )
