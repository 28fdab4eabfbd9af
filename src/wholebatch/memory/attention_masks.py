"""Attention masks in a prediction: left out where a real run leaves them out.

Models of transformers make no mask where nothing is padded and no sequences are packed: attention
takes less memory then. They find out by reading tensors, and fake ones cannot be read, so a mask
would always be made. Here the batch is read instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from wholebatch.core.splitting.samples import Leaf, flatten

__all__ = ["masks_as_for"]


@contextmanager
def masks_as_for(batch: Any) -> Iterator[None]:
    """While this is entered, transformers makes the masks of fake tensors as it would for `batch`.

    What cannot be read of the batch counts as padded, which is the larger of the two.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    if masking is None:
        yield
        return
    leaves, _ = flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf.value, torch.Tensor)]
    instead: dict[str, Callable[[Any], Any]] = {}
    if not any(_may_be_padding(leaf.value) for leaf in tensors):
        for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
            instead[name] = _without_padding
    if not any(_is_packed(leaf) for leaf in tensors):
        instead["find_packed_sequence_indices"] = _never_packed
    before = {name: getattr(masking, name) for name in instead if hasattr(masking, name)}
    for name, function in before.items():
        setattr(masking, name, instead[name](function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(masking, name, function)


def _without_padding(function: Callable[..., Any]) -> Callable[..., Any]:
    def asked(padding_mask: Any, *args: Any, **kwargs: Any) -> Any:
        is_fake = isinstance(padding_mask, FakeTensor)
        return function(None if is_fake else padding_mask, *args, **kwargs)

    return asked


def _never_packed(function: Callable[..., Any]) -> Callable[..., Any]:
    def asked(position_ids: Any) -> Any:
        return None if isinstance(position_ids, FakeTensor) else function(position_ids)

    return asked


def _may_be_padding(tensor: torch.Tensor) -> bool:
    """Whether this may be a mask that hides something: zeros and ones, one row for each sample."""
    if tensor.dim() != 2:
        return False
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return True
    hidden = tensor == 0
    return bool(hidden.any()) and bool((hidden | (tensor == 1)).all())


def _is_packed(leaf: Leaf) -> bool:
    """Whether these are positions that begin again within a row."""
    tensor: torch.Tensor = leaf.value
    if "position" not in leaf.name or tensor.dim() != 2:
        return False
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return True
    return bool((tensor.diff(dim=-1) != 1).any())
