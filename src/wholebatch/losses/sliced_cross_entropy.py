"""Cross-entropy of a linear layer, with logits computed in slices to save memory.

With a large vocabulary the logits of a micro-batch are its largest tensor by far. Here they are
made and used up in slices of tokens, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

_AT_ONCE = 1 << 26
_LOOKED_AT: WeakKeyDictionary[nn.Module, tuple[Any, Any, bool]] = WeakKeyDictionary()
"""The output layer and the base of a model as they were when it was looked at, and the answer."""


def rows_at_once(vocabulary: int) -> int:
    """Return the number of tokens per slice, so that its logits take at most 256 MiB."""
    return max(1024, _AT_ONCE // vocabulary // 128 * 128)


def output_layer(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], logits_of: Callable[[Any], Tensor]
) -> nn.Linear | None:
    """Return the linear layer from `base_model`'s hidden states to the logits, or None.

    Some models scale or bend their logits afterwards. So a model is looked at on a few tokens of
    what it is called with, whenever its output layer or its base is another one: the layer's input
    must be what `base_model` gave, its output the logits.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "base_model"):
        return None
    head = getattr(model, "get_output_embeddings", _none)()
    before, base_before, is_last = _LOOKED_AT.get(model, (None, None, False))
    if (
        head is None
        or before is None
        or before() is not head
        or base_before() is not model.base_model
    ):

        def logits() -> Tensor:
            few = {name: value[:1, :4] for name, value in kwargs.items()}
            return logits_of(model(*(one[:1, :4] for one in args), **few))

        is_last = _is_output_layer(model, head, logits)
        if head is not None:
            _LOOKED_AT[model] = ref(head), ref(model.base_model), is_last
    return head if is_last else None


def _none() -> Any:
    return None


def _is_output_layer(model: Any, head: Any, run: Callable[[], Tensor]) -> bool:
    """True if `head` makes the logits of the model from what its base returns, and nothing else."""
    base = model.base_model
    hooked = model._forward_hooks or model._forward_pre_hooks  # engines that shard live in these
    if not isinstance(head, nn.Linear) or base is model or hooked or hasattr(model, "module"):
        return False
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
        return bool(same and seen["given"].shape == seen["base"].shape)
    except Exception:  # a model that cannot be asked keeps the plain way
        return False
    finally:
        for handle in handles:
            handle.remove()


def sliced_cross_entropy(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of `head(hidden)` with `labels`; -100 is ignored.

    Each slice is checkpointed: its backward computes the logits again. In a graph each slice makes
    its gradients as soon as it has logits, since the backward's scale is known from the start.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    rows, recomputes = rows_at_once(head.weight.shape[0]), not joins_graph(hidden)
    totals = []
    for h, y in zip(hidden.split(rows), labels.split(rows), strict=True):
        given = (h, head.weight, head.bias, y)
        if recomputes:
            total = checkpoint(_slice, *given, use_reentrant=False, preserve_rng_state=False)
        else:
            total = _slice(*given)
        totals.append(total)
    return torch.stack(totals).sum()


def joins_graph(hidden: Tensor) -> bool:
    """True while a micro-step is traced for a device whose graphs have the fused operation."""
    return isinstance(hidden, FakeTensor) and hidden.device.type == "cuda"


def _slice(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """Return the sum over some tokens.

    The weight is cast for each slice: the gradients of the slices are then added in its own dtype.
    """
    dtype = hidden.dtype
    with torch.autocast(hidden.device.type, enabled=False):
        cast = None if bias is None else bias.to(dtype)
        logits = functional.linear(hidden, weight.to(dtype), cast)
        wide = logits.to(torch.promote_types(dtype, torch.float32))
        return functional.cross_entropy(wide, labels, reduction="sum")
