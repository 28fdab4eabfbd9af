"""A model sharded by FSDP2 as on one of several ranks, without the other ranks.

`fully_shard` runs on fake tensors like any other code, on torch's fake process group, which sends
nothing. So the memory that one rank holds, gathers and frees is counted where it happens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.memory.activation_checkpointing import repeated_blocks

SYNCS: tuple[Literal["gathered", "hold", "every"], ...] = ("gathered", "hold", "every")


@dataclass(frozen=True)
class Sharding:
    """FSDP2 over this many ranks: each repeated block, then the rest."""

    ranks: int
    sync: Literal["gathered", "hold", "every"] = "hold"
    """The time to reduce gradients: once per window ("hold"), or after "every" micro-batch.

    "hold" keeps whole gradients until then; "every" keeps slices. "gathered" keeps whole parameters
    too, which are gathered once per window.
    """

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise OptionError(f"ranks={self.ranks}: sharding takes at least 2")
        if self.sync not in SYNCS:
            raise OptionError(f'sync={self.sync!r}: must be "gathered", "hold" or "every"')


def choose_sync(
    model: nn.Module, *, ranks: int, budget: int
) -> Literal["gathered", "hold", "every"]:
    """Return the choice of `sync="auto"`: the first that fills at most half of the free memory.

    >>> [choose_sync(nn.Linear(100, 100), ranks=4, budget=n << 10) for n in (256, 128, 64)]
    ['gathered', 'hold', 'every']
    """
    weights = sum(p.nbytes for p in model.parameters())
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    free = budget - weights // ranks
    if 2 * (weights + gradients) <= free:
        return "gathered"
    return "hold" if 2 * gradients <= free else "every"


def wire_bytes(model: nn.Module, sharding: Sharding, micro_batches: int) -> int:
    """Return the bytes that a rank receives in a window, but for a few small sums.

    FSDP2 gathers a block's parameters in each forward and again in each backward. A ring of n ranks
    moves (n - 1) / n of a tensor through each of them, to gather it and to reduce and scatter it.
    """
    weights = sum(p.nbytes for p in model.parameters())
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    gathers = 1 if sharding.sync == "gathered" else 2 * micro_batches
    reductions = micro_batches if sharding.sync == "every" else 1
    sent = gathers * weights + reductions * gradients
    return sent * (sharding.ranks - 1) // sharding.ranks


@contextmanager
def pretended_ranks(ranks: int) -> Iterator[None]:
    """Create a fake process group of this many ranks, or reuse one that exists."""
    if dist.is_available() and dist.is_initialized():
        if dist.get_backend() != "fake" or dist.get_world_size() != ranks:
            raise UnsupportedError(
                f"the memory of {ranks} ranks cannot be predicted in a process that is itself one "
                f"of {dist.get_world_size()} ranks: predict before init_process_group()"
            )
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard(
    model: nn.Module,
    mode: Any,
    parameters: Mapping[int, nn.Parameter],
    *,
    ranks: int,
    device: torch.device,
) -> dict[int, nn.Parameter]:
    """Shard a model of fake tensors in place; return its parameters by the same ids as before."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from wholebatch.distributed.fsdp import check_dtypes

    check_dtypes(model)
    names = {id(p): name for name, p in model.named_parameters()}
    mesh = init_device_mesh(device.type, (ranks,))
    with mode:
        for name in repeated_blocks(model):
            fully_shard(model.get_submodule(name), mesh=mesh)
        fully_shard(model, mesh=mesh)
    return {
        original: model.get_parameter(names[id(fake)])
        for original, fake in parameters.items()
        if id(fake) in names
    }
