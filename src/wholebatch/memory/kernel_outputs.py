"""What kernels really make, where torch's shape functions say otherwise or refuse to say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

__all__ = ["as_on_cuda", "asked_of"]

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


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """While this is entered, dropout takes on a CPU what CUDA's fused kernels take.

    Fused attention draws its dropout anew in the backward: it keeps q, k, v, the output and the
    sums of the softmax, with dropout as without. A CPU has such a kernel only without, and makes
    the matrix of all pairs otherwise. Dropout keeps a mask of one byte for each number on CUDA; on
    a CPU the mask has the dtype of the input.
    """
    attention, dropout = functional.scaled_dot_product_attention, functional.dropout

    def attended(*args: Any, **kwargs: Any) -> Any:
        if "dropout_p" in kwargs and _attends_in_one_kernel():
            kwargs["dropout_p"] = 0.0
        elif len(args) > _DROPOUT_P and _attends_in_one_kernel():
            args = (*args[:_DROPOUT_P], 0.0, *args[_DROPOUT_P + 1 :])
        return attention(*args, **kwargs)

    def dropped(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if inplace or not training or not 0.0 < p < 1.0:
            return dropout(input, p, training, inplace)
        return torch.native_dropout(input, p, train=True)[0]

    functional.scaled_dot_product_attention, functional.dropout = attended, dropped
    try:
        yield
    finally:
        functional.scaled_dot_product_attention, functional.dropout = attention, dropout


_DROPOUT_P = 4  # its place among the arguments of attention


def _attends_in_one_kernel() -> bool:
    """Tell if a fused kernel may be chosen: `sdpa_kernel(SDPBackend.MATH)` forbids them all."""
    return bool(
        torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.mem_efficient_sdp_enabled()
    )
