"""The choice of a gradient store by its option, or the reason why it cannot be used here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from wholebatch.distributed import Sync
from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.offload.adam_accumulation import MomentsStore, check_moments
from wholebatch.offload.host_store import HostStore
from wholebatch.offload.parameter_buckets import check_parts
from wholebatch.offload.release_store import ReleaseStore, check_release
from wholebatch.offload.swap_store import SwapStore, check_swap
from wholebatch.window.close import CloseOptions
from wholebatch.window.gradient_store import DeviceStore, Store, refuse_foreign_code

if TYPE_CHECKING:
    from wholebatch.options import Memory
    from wholebatch.window.model_and_optimizer import Target


GradientsOn: TypeAlias = Literal["device", "host", "swap", "release", "moments"]
OptimizerOn: TypeAlias = Literal["device", "host"]


def choose(
    memory: Memory,
    *,
    target: Target,
    options: CloseOptions,
    sync: Sync,
    counts_units: bool,
    on_gradient: bool,
) -> Store:
    """Return the store for `memory.gradients`, checked against all other options.

    `counts_units` is True if the units of a window are known before its first backward,
    `on_gradient` if a function of the user's is to see the whole gradient.
    """
    gradients, optimizer_on = memory.gradients, memory.optimizer
    _check_name("gradients", gradients, get_args(GradientsOn))
    _check_name("optimizer_on", optimizer_on, get_args(OptimizerOn))
    is_whole = all(type(parameter.data) is torch.Tensor for parameter in target.trained())
    runs_itself = sync.grows_own_graph or sync.owns_hooks or not is_whole
    if runs_itself and (gradients != "device" or optimizer_on != "device"):
        given = f"optimizer_on={optimizer_on!r}"
        if gradients != "device":
            given = f"gradients={gradients!r}"
        raise UnsupportedError(
            f"{given} on a model that an engine shards or runs: its gradients are not made in the "
            'parameters\' own hooks. Use a plain model or DDP; or leave gradients="device" and '
            "optimizer_on away and let the engine shard more: fully_shard, or DeepSpeed's ZeRO 2 "
            "or 3, with offload_optimizer"
        )
    if optimizer_on == "host" and gradients != "host":
        raise OptionError(
            f'optimizer_on="host" with gradients={gradients!r}: the step on the host takes the '
            'gradients that are summed there; add gradients="host"'
        )
    if on_gradient:
        _check_whole_gradient("on_gradient=", gradients, sync)
    if not target.steps:
        _check_whole_gradient("optimizer=None", gradients, sync)
    if gradients == "device":
        return DeviceStore(target, options, sync)
    option = f"gradients={gradients!r}"
    _check_dense(target, option)
    if gradients == "moments":
        refuse_foreign_code(target.optimizers, option)
        check_moments(target, options, counts_units=counts_units)
        return MomentsStore(target, options, sync)
    check_parts(target.optimizers, option)
    if gradients == "swap":
        check_swap(target)
        return SwapStore(target, options, sync)
    if gradients == "release":
        check_release(target, options, counts_units=counts_units)
        return ReleaseStore(target, options, sync)
    return HostStore(target, options, sync, steps_on_host=optimizer_on == "host")


def _check_name(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise OptionError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")


def _check_whole_gradient(what: str, gradients: str, sync: Sync) -> None:
    if sync.owns_hooks:
        raise UnsupportedError(
            f"{what} with DeepSpeed's ZeRO 1 to 3: its gradients are in the engine's own slices, "
            "not in .grad; use ZeRO 0, DDP or FSDP2"
        )
    if gradients not in ("device", "swap") or (gradients == "swap" and what == "optimizer=None"):
        raise OptionError(
            f"{what} with gradients={gradients!r}: the whole gradient is never in .grad there; use "
            'gradients="device"'
        )


def _check_dense(target: Target, option: str) -> None:
    for model in target.models:
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise UnsupportedError(
                    f"{option} with {name}(sparse=True): sums of sparse gradients have no fixed "
                    "size; use sparse=False, or keep the gradients on the device"
                )
