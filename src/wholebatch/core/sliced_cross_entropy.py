"""Cross-entropy of a linear layer whose logits are never there as a whole.

With a large vocabulary the logits of a micro-batch are its largest tensor by far. Here they are
made and used up in slices of tokens, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

Tiny: TypeAlias = Callable[[], tuple[Tensor, ...] | dict[str, Tensor]]
"""A few tokens as the model takes them, positional or by name."""

_AT_ONCE = 1 << 26
_OUTPUT_LAYERS: WeakKeyDictionary[nn.Module, nn.Linear | None] = WeakKeyDictionary()


def rows_at_once(vocabulary: int) -> int:
    """Return the tokens whose logits are made at once: 256 MiB of them at most."""
    return max(1024, _AT_ONCE // vocabulary // 128 * 128)


def output_layer(model: Any, tiny: Tiny, logits_of: Callable[[Any], Tensor]) -> nn.Linear | None:
    """Return the linear layer from `base_model`'s hidden states to the logits, or None.

    Some models scale or bend their logits afterwards. So it is looked at, once for each model and
    on a few tokens: the layer's input must be what `base_model` gave, its output the logits.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "base_model"):
        return None
    if model not in _OUTPUT_LAYERS:
        _OUTPUT_LAYERS[model] = _find_output_layer(model, tiny, logits_of)
    return _OUTPUT_LAYERS[model]


def _find_output_layer(
    model: Any, tiny: Tiny, logits_of: Callable[[Any], Tensor]
) -> nn.Linear | None:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    base = model.base_model
    hooked = model._forward_hooks or model._forward_pre_hooks  # engines that shard live in these
    if not isinstance(head, nn.Linear) or base is model or hooked or hasattr(model, "module"):
        return None
    seen: dict[str, Any] = {}
    handles = [
        head.register_forward_hook(lambda _, given, out: seen.update(given=given[0], out=out)),
        base.register_forward_hook(
            lambda _, __, out: seen.update(base=getattr(out, "last_hidden_state", out))
        ),
    ]
    devices = [head.weight.device] if head.weight.device.type == "cuda" else []
    try:
        few = tiny()
        with torch.no_grad(), torch.random.fork_rng(devices):
            logits = logits_of(model(**few) if isinstance(few, dict) else model(*few))
        same = logits is seen["out"] and seen["given"].data_ptr() == seen["base"].data_ptr()
        return head if same and seen["given"].shape == seen["base"].shape else None
    except Exception:  # a model that cannot be asked keeps the plain way
        return None
    finally:
        for handle in handles:
            handle.remove()


def sliced_cross_entropy(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of `head(hidden)` with `labels`; -100 is ignored."""
    weight: Tensor = head.weight
    bias: Tensor | None = head.bias
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    apply: Callable[..., Tensor] = _SlicedCrossEntropy.apply
    return apply(hidden, weight, bias, labels)


class _SlicedCrossEntropy(torch.autograd.Function):
    """sum of cross_entropy(hidden @ weightᵀ + bias, labels), with the gradients made on the way.

    For a slice of tokens, d(logits) = softmax − one-hot is at hand as soon as its logits are. So
    the gradients of all inputs are added up in the forward, and nothing is computed twice; the
    backward multiplies by what comes from above. fp16 would lose them before they are scaled, so
    they are kept in fp32 there.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        narrow = wide if hidden.dtype is torch.float16 else hidden.dtype
        total = hidden.new_zeros((), dtype=wide)
        d_hidden = torch.empty_like(hidden, dtype=narrow)
        d_weight = torch.zeros_like(weight, dtype=wide)
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=wide)
        rows = rows_at_once(weight.shape[0])
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(labels), rows):
                h, y = hidden[start : start + rows], labels[start : start + rows, None]
                logits = functional.linear(h, weight, bias).to(wide)
                counted = y != -100
                y = y.masked_fill(~counted, 0)  # where() would copy its 0 from the host
                log_sum = logits.logsumexp(-1, keepdim=True)
                total += ((log_sum - logits.gather(1, y)) * counted).sum()
                slope = logits.sub_(log_sum).exp_()  # the softmax, in the memory of the logits
                slope.scatter_add_(1, y, torch.full_like(y, -1, dtype=wide)).mul_(counted)
                if d_bias is not None:
                    d_bias += slope.sum(0)
                slope = slope.to(narrow)
                d_hidden[start : start + rows] = slope @ weight.to(narrow)
                d_weight += slope.t() @ h.to(narrow)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtypes = (hidden.dtype, weight.dtype)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        of_hidden, of_weight = ctx.dtypes
        return (
            (d_hidden * above).to(of_hidden),
            (d_weight * above).to(of_weight),
            None if d_bias is None else (d_bias * above).to(of_weight),
            None,
        )
