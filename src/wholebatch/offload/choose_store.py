"""Choose the gradient store for `wb.Memory(optimizer_state=...)`, or refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from wholebatch.distributed import Sync
from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.offload.partial_step import check_per_parameter
from wholebatch.offload.state_on_host import OPTION, HostStateStore
from wholebatch.window.close import Handover, Store
from wholebatch.window.close_options import CloseOptions

if TYPE_CHECKING:
    from wholebatch.window.model_and_optimizer import Target


def choose(
    place: str,
    *,
    target: Target,
    options: CloseOptions,
    sync: Sync,
    on_gradient: bool,
    handover: Handover | None = None,
) -> Store:
    """Return the store for `optimizer_state=place`, or raise if it cannot be used here.

    `on_gradient` is True if a function of the user's is to see the whole gradient.
    """
    if place not in ("device", "host"):
        raise OptionError(f'optimizer_state={place!r}: must be "device" or "host"')
    if sync.owns_hooks and (on_gradient or not target.steps):
        option = "on_gradient=" if on_gradient else "optimizer=None"
        raise UnsupportedError(
            f"{option} with DeepSpeed's ZeRO 1 to 3: its gradients are in the engine's own slices, "
            "not in .grad; use ZeRO 0, DDP or FSDP2"
        )
    if place == "device":
        return Store(target, options, sync, handover)
    if not target.steps:
        raise OptionError(f"optimizer=None with {OPTION}: there is no optimizer state to move")
    is_whole = all(type(parameter.data) is torch.Tensor for parameter in target.trained())
    if not sync.adds_to_parameters or sync.owns_hooks or not is_whole:
        raise UnsupportedError(
            f"{OPTION} on a model that an engine shards or runs: the engine holds the optimizer "
            "state. Use a plain model or DDP, or let the engine save the memory: shard over more "
            "ranks with fully_shard, or use DeepSpeed's ZeRO 2 or 3 with offload_optimizer"
        )
    for optimizer in target.optimizers:
        check_per_parameter(optimizer, OPTION)
    return HostStateStore(target, options, sync, handover)
