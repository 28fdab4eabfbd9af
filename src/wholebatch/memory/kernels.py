"""What kernels really make, where torch's shape functions say otherwise or refuse to say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["asked_of"]

_aten = torch.ops.aten

_WEIGHT_OF = {
    _aten.native_batch_norm.default: 1,
    _aten._native_batch_norm_legit.default: 1,
    _aten._native_batch_norm_legit.no_stats: 1,
    _aten.native_group_norm.default: 1,
    _aten.native_layer_norm.default: 2,
}
"""Normalisations that save statistics for their backward: which argument is the weight."""


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Products of groups of rows (experts): the kernel takes fp32 too, the shape function bf16."""
    if a.dim() == b.dim() == 2:
        assert offs is not None
        shape = [offs.shape[0], a.shape[0], b.shape[1]]
    elif a.dim() == b.dim():
        shape = [a.shape[0], a.shape[1], b.shape[2]]
    else:
        shape = [a.shape[-2], b.shape[-1]]
    return torch.empty(shape, dtype=out_dtype or a.dtype, device=a.device)


def _rand(size: Any, **options: Any) -> torch.Tensor:
    """One random number decides whether a layer is left out (LayerDrop): none is, as is larger."""
    return torch.rand(size, **options) if size else torch.tensor(1.0)


_INSTEAD: dict[Any, Callable[..., Any]] = {_aten.rand.default: _rand}
if hasattr(_aten, "_grouped_mm"):
    _INSTEAD[_aten._grouped_mm.default] = _grouped_mm


def asked_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result of `func` on fake tensors, with the bytes that its kernel would have made."""
    result = _INSTEAD.get(func, func)(*args, **kwargs)
    place = _WEIGHT_OF.get(func)
    if place is not None and args[place] is not None and args[place].dtype != args[0].dtype:
        # 16-bit input with fp32 weights: mean and deviation are saved in the dtype of the weights.
        output, *saved = result
        return (output, *(one.to(args[place].dtype) for one in saved))
    return result
