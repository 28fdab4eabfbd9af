"""Choose the synchronisation strategy for the engine that a model is wrapped in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.distributed.sync_strategy import Local, Sync
from wholebatch.errors import OptionError, UnsupportedError

_log = logging.getLogger("wholebatch")

Fits: TypeAlias = Callable[[int], bool]

_SUPPORTED = (
    "supported are plain modules, DistributedDataParallel, FSDP2's fully_shard and the engine that "
    "deepspeed.initialize returns; wrap the model in one of these"
)
_ONE_MODEL = {
    "fsdp2": "several fully_shard models in one accumulator: put them into one nn.ModuleDict",
    "deepspeed": "several DeepSpeed engines in one accumulator: give each engine its own "
    "accumulator and its own loop",
}


def choose(
    models: nn.Module | Sequence[nn.Module], *, sync: str = "auto", fits: Fits | None = None
) -> Sync:
    """Return the strategy for the engine that these models are wrapped in.

    `fits(bytes)` is True if the device has room for so many beside the activations. Without it the
    model's forwards may come before a window, and "auto" does not gather parameters.
    """
    if sync not in ("auto", "hold", "every", "gathered", "none"):
        allowed = '"hold", "every", "gathered", "none" or "auto"'
        raise OptionError(f"sync={sync!r}: must be {allowed}")
    models = [models] if isinstance(models, nn.Module) else models
    if not isinstance(models, Sequence):  # one that holds something else is refused with its target
        raise OptionError(f"model={type(models).__name__}: must be an nn.Module or a list of them")
    kinds = {_kind(model) for model in models if isinstance(model, nn.Module)} or {"plain"}
    if len(kinds) > 1:
        raise UnsupportedError(
            f"models wrapped in different engines ({', '.join(sorted(kinds))}) in one accumulator: "
            "wrap them in the same way, or give each its own accumulator"
        )
    [kind] = kinds
    if kind == "plain":
        if sync != "none" and dist.is_available() and dist.is_initialized():
            warn_alone(dist.get_world_size())
        return Local()
    if kind == "tensor parallel":
        from wholebatch.distributed.tensor_parallel import TensorParallel

        return TensorParallel()
    if kind not in ("ddp", "fsdp2", "deepspeed"):
        raise UnsupportedError(f"model wrapped in {kind}: {_SUPPORTED}")
    if sync == "none":
        raise OptionError(
            f'sync="none" on a model of {kind}: this engine reduces gradients itself. Leave it out'
        )
    if sync == "gathered" and kind != "fsdp2":
        raise OptionError(
            f'sync="gathered" on a model of {kind}: this option is for FSDP2\'s fully_shard'
        )
    if len(models) > 1 and kind in _ONE_MODEL:
        raise UnsupportedError(_ONE_MODEL[kind])
    wrapped: Any = models
    if kind == "ddp":  # an engine is imported where it is used
        from wholebatch.distributed.ddp import Replicated

        return Replicated(wrapped, sync=sync)
    if kind == "fsdp2":
        return _fsdp2(wrapped[0], sync, fits)
    from wholebatch.distributed.deepspeed import DeepSpeed

    return DeepSpeed(wrapped[0], sync=sync)


def _fsdp2(model: nn.Module, sync: str, fits: Fits | None) -> Sync:
    """Return the strategy for a `fully_shard` model.

    "auto" takes the first that has room on all ranks: whole parameters and gradients ("gathered"),
    whole gradients ("hold"), neither ("every").
    """
    from wholebatch.distributed.fsdp import Sharded
    from wholebatch.distributed.gathered import Gathered, whole_bytes, why_not

    if sync == "auto" and fits is not None:
        held = Sharded(model)
        weights, gradients = whole_bytes(model)
        room = int(fits(gradients))
        room += room and why_not(model) is None and fits(weights + gradients)
        _, room = held.group.most_and_fewest(room)
        if room == 2:
            return Gathered(model)
        return held if room else Sharded(model, sync="every")
    return Gathered(model) if sync == "gathered" else Sharded(model, sync=sync)


_WRAPPED = (
    "the wrapped model: the DistributedDataParallel (not its .module), the model after "
    "fully_shard, or the engine of deepspeed.initialize (not its .module). If each rank should "
    'train alone, pass close=wb.Close(sync="none")'
)


def warn_alone(ranks: int, instead: str = _WRAPPED) -> None:
    """Warn of a plain model on several ranks, where nothing reduces its gradients."""
    if ranks > 1:
        _log.warning(
            "a plain model in a job of %d ranks: nothing reduces its gradients, so each rank "
            "trains its own model. Pass %s",
            ranks,
            instead,
        )


_ENGINES = {
    ("torch", "FullyShardedDataParallel"),
    ("fairscale", "FullyShardedDataParallel"),
    ("apex", "DistributedDataParallel"),
    ("megatron", "DistributedDataParallel"),
}
"""Wrappers that reduce gradients, by their package and class."""


def _origins(module: nn.Module) -> set[tuple[str, str]]:
    """Return the packages and names of a module's classes."""
    bases = type(module).__mro__
    return {(base.__module__.partition(".")[0], base.__name__) for base in bases}


def _kind(model: nn.Module) -> str:
    """Return "plain", "ddp", "fsdp2", "deepspeed", or a description of another wrapper."""
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    if ("deepspeed", "DeepSpeedEngine") in _origins(model):
        return "deepspeed"
    for module in model.modules():
        origins = _origins(module)
        if ("torch", "FSDPModule") in origins:
            return "fsdp2"
        if not _ENGINES.isdisjoint(origins) or any(home == "deepspeed" for home, _ in origins):
            return type(module).__name__
        if isinstance(module, DistributedDataParallel):
            return f"{type(model).__name__} around DistributedDataParallel"
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return f"DeepSpeed ({type(model).__name__} with parameters of ZeRO 3, not its engine)"
    if any("DTensor" in (type(p).__name__, type(p.data).__name__) for p in model.parameters()):
        return "tensor parallel"
    return "plain"
