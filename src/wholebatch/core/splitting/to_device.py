"""Moving a micro-batch to the device, so that the whole batch never has to be there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from wholebatch.core.splitting.structure import flatten

__all__ = ["to_device"]


def to_device(micro: Any, device: torch.device | str | int) -> Any:
    """Return `micro` with every tensor on `device`; return it unchanged if it is already there.

    Copies to a CUDA device go through pinned memory and do not block the host, so they overlap with
    work queued on the device. Everything that is not a tensor stays as it is.
    """
    target = torch.device(device)
    leaves, structure = flatten(micro)
    moved = [_move(leaf.value, target) for leaf in leaves]
    if all(new is leaf.value for new, leaf in zip(moved, leaves, strict=True)):
        return micro
    return structure.build(moved)


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, PackedSequence):
        packed: Any = value  # Its annotation has only one of the signatures of Tensor.to.
        return packed.to(device)
    if not isinstance(value, Tensor):
        return value
    if device.type != "cuda" or value.device.type != "cpu":
        return value.to(device)
    if value.layout == torch.strided and not value.is_nested and not value.is_pinned():
        # A copy from pageable memory always blocks the host. The pinned block is released only
        # after the copy: PyTorch's host allocator marks it with an event.
        value = value.pin_memory()
    return value.to(device, non_blocking=True)
