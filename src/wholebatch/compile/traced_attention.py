"""Attention in a trace: a mask that is only causal becomes `is_causal=True`.

transformers decides by a mask's values whether attention needs it, and cannot read them while it is
traced. So its causal models come with a mask, for which kernels compute all scores, and with keys
and values repeated for every head. If the mask is computed from constants alone, it can be read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from wholebatch.compile.constant_values import computed, node_of
from wholebatch.compile.fusion import VIEWS
from wholebatch.window.precision import SIXTEEN_BIT

aten = torch.ops.aten
_ATTENTION = functional.scaled_dot_product_attention
_CAUSAL = "wholebatch_causal"


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call torch's attention, with `is_causal` instead of a mask that says no more."""
    if attn_mask is not None:
        if _always_causal(attn_mask, query.shape[-2], key.shape[-2]):
            attn_mask, is_causal = None, True
            if (times := _repeats(query, key, value)) > 1:
                key, value = (tensor.unflatten(1, (-1, times))[:, :, 0] for tensor in (key, value))
                enable_gqa = True
        elif attn_mask.dim() and attn_mask.stride(-1) != 1:
            attn_mask = attn_mask.contiguous()  # Fused kernels refuse T5's, whose heads come last.
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, **options)


def _always_causal(mask: Tensor, rows: Any, columns: Any) -> bool:
    """True if this mask is computed from constants alone and hides the future only."""
    sizes = *mask.shape[-2:], rows, columns
    if not all(isinstance(size, int) for size in sizes) or len(set(sizes)) != 1:
        return False
    node, root = node_of(mask)
    if node is None or mask.requires_grad:
        return False
    if _CAUSAL not in node.meta:  # Every layer asks.
        hidden = computed(node, root, {})
        with _disable_current_modes():
            node.meta[_CAUSAL] = isinstance(hidden, Tensor) and _hides_the_future(hidden)
    return bool(node.meta[_CAUSAL])


def _hides_the_future(mask: Tensor) -> bool:
    past = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril().expand_as(mask)
    if mask.dtype is torch.bool:
        return torch.equal(mask, past)
    hidden = mask <= torch.finfo(mask.dtype).min
    return torch.equal(hidden, ~past) and not bool(mask[past].any())


def _repeats(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return how often each key and value was repeated for the heads, if kernels need not have it.

    Kernels for 16 bit read each as often as needed; for other dtypes torch has none. The gradient
    of the first of a group is the sum over the group, and the others get none.
    """
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    times = {_repeats_of(key), _repeats_of(value)}
    return times.pop() if len(times) == 1 and dtype in SIXTEEN_BIT else 1


def _repeats_of(heads: Tensor) -> int:
    """Return how often each head was repeated, by `expand` and a view, for `heads` (B, H, S, D)."""
    node, _ = node_of(heads)
    for allowed in (VIEWS, (aten.clone.default,)):  # One head can be viewed without a copy.
        if node is not None and node.target in allowed:
            node = node.all_input_nodes[0]
    if node is None or node.target is not aten.expand.default:
        return 1
    before, after = node.all_input_nodes[0].meta["val"].shape, node.meta["val"].shape
    if len(before) != 5 or before[2] != 1 or heads.shape[1] != after[1] * after[2]:
        return 1
    return int(after[2])
