"""Cross-entropy of a linear layer whose logits are never there as a whole.

With a large vocabulary the logits of a micro-batch are its largest tensor by far. Here they are
made and used up in slices of tokens, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

_AT_ONCE = 1 << 26
_OUTPUT_LAYERS: WeakKeyDictionary[nn.Module, nn.Linear | None] = WeakKeyDictionary()


def rows_at_once(vocabulary: int) -> int:
    """Return the tokens whose logits are made at once: 256 MiB of them at most."""
    return max(1024, _AT_ONCE // vocabulary // 128 * 128)


def output_layer(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], logits_of: Callable[[Any], Tensor]
) -> nn.Linear | None:
    """Return the linear layer from `base_model`'s hidden states to the logits, or None.

    Some models scale or bend their logits afterwards. So it is looked at, once for each model and
    on a few tokens of what the model is called with: the layer's input must be what `base_model`
    gave, its output the logits.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "base_model"):
        return None
    if model not in _OUTPUT_LAYERS:

        def logits() -> Tensor:
            few = {name: value[:1, :4] for name, value in kwargs.items()}
            return logits_of(model(*(one[:1, :4] for one in args), **few))

        _OUTPUT_LAYERS[model] = _find_output_layer(model, logits)
    return _OUTPUT_LAYERS[model]


def _find_output_layer(model: Any, run: Callable[[], Tensor]) -> nn.Linear | None:
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
        with torch.no_grad(), torch.random.fork_rng(devices):
            logits = run()
        same = logits is seen["out"] and seen["given"].data_ptr() == seen["base"].data_ptr()
        return head if same and seen["given"].shape == seen["base"].shape else None
    except Exception:  # a model that cannot be asked keeps the plain way
        return None
    finally:
        for handle in handles:
            handle.remove()


def sliced_cross_entropy(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of `head(hidden)` with `labels`; -100 is ignored."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    if joins_graph(hidden):
        return _in_a_graph(hidden, head, labels)
    apply: Callable[..., Tensor] = _SlicedCrossEntropy.apply
    return apply(hidden, head.weight, head.bias, labels)


def joins_graph(hidden: Tensor) -> bool:
    """True while a micro-step is traced for a device whose graphs have the fused operation."""
    return isinstance(hidden, FakeTensor) and hidden.device.type == "cuda"


def _in_a_graph(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """Compute the slices by plain operations, which the rewrite of the graph fuses.

    There the seed of the backward is known from the start. So each slice makes its gradients as
    soon as it has logits, and its products add into the buffers.
    """
    rows, dtype = rows_at_once(head.weight.shape[0]), hidden.dtype
    totals = []
    with torch.autocast(hidden.device.type, enabled=False):
        for h, y in zip(hidden.split(rows), labels.split(rows), strict=True):
            # Cast for each slice: the gradients of the slices are then added in full precision.
            bias = None if head.bias is None else head.bias.to(dtype)
            logits = functional.linear(h, head.weight.to(dtype), bias).to(_wide(dtype))
            totals.append(functional.cross_entropy(logits, y, reduction="sum"))
    return torch.stack(totals).sum()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _SlicedCrossEntropy(torch.autograd.Function):
    """sum of cross_entropy(hidden @ weightᵀ + bias, labels), by slices of tokens.

    The backward computes the logits of a slice again, and from them d(logits) = softmax − one-hot,
    times what comes from above. So no gradient waits between forward and backward.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, labels)
        total = hidden.new_zeros((), dtype=_wide(hidden.dtype))
        for _, logits, y in _slices(hidden, labels, weight, bias):
            total += functional.cross_entropy(logits.to(total.dtype), y, reduction="sum")
            del logits  # before the next slice's are made
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels = ctx.saved_tensors
        w = weight.to(hidden.dtype)
        d_hidden = torch.empty_like(hidden)
        d_weight = d_bias = None
        for part, logits, y in _slices(hidden, labels, weight, bias):
            logits = _slope(logits, y, above)
            d_hidden[part] = logits @ w
            product = logits.t() @ hidden[part]
            if d_weight is None:
                d_weight = product.to(above.dtype)
            else:
                d_weight += product
            if bias is not None:
                column = logits.sum(0, dtype=above.dtype)
                d_bias = column if d_bias is None else d_bias + column
            del logits  # before the next slice's are made
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
        )


def _slices(
    hidden: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield slices of the tokens, with their logits and labels."""
    rows, dtype = rows_at_once(weight.shape[0]), hidden.dtype
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(labels), rows):
            part = slice(start, start + rows)
            yield part, functional.linear(hidden[part], weight, bias), labels[part]


def _slope(logits: Tensor, labels: Tensor, above: Tensor) -> Tensor:
    """Return d(logits) times what comes from above, in the dtype of the logits."""
    counted = (labels != -100)[:, None]
    places = labels[:, None].masked_fill(~counted, 0)  # where() would copy its 0 from the host
    slope = logits.to(_wide(logits.dtype)).softmax(-1)
    slope.scatter_add_(1, places, torch.full_like(places, -1, dtype=slope.dtype))
    return slope.mul_(counted * above).to(logits.dtype)
