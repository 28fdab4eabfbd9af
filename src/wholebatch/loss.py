"""The loss contract: a sum, and the units that it is a sum over.

A mean of means is only the mean when every part is equally large. So a loss function here says
two things, the *total* and the *units*, and the one division by all units of the window is made
once, at its close:

    gradient of the window = sum over micro-batches of d(total) / sum over micro-batches of units

>>> import torch
>>> per_sample = torch.tensor([0.5, 1.5], requires_grad=True)
>>> loss = Loss(per_sample.sum(), units=2)
>>> loss.total.item(), loss.units
(2.0, 2)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from wholebatch.errors import LossError

__all__ = [
    "Loss",
    "Term",
    "Terms",
    "Units",
    "as_loss",
    "causal_lm",
    "check_total",
    "check_units",
    "cross_entropy",
    "mean_loss",
]

Units: TypeAlias = int | float | Tensor

_SUM_OR_MEAN = (
    "is this scalar a sum or a mean? For a sum return wb.Loss(total, units), "
    "for a mean return wb.mean_loss(mean, units), where units is what it is taken over "
    "(samples, tokens, weights); or return the tensor of per-unit losses"
)


def check_total(total: object) -> Tensor:
    """The total itself, or a LossError that says what is wrong with it."""
    if not isinstance(total, Tensor):
        raise LossError(f"total={total!r}: must be a 0-dim tensor, the sum of the losses")
    if total.dim() != 0:
        raise LossError(
            f"total of shape {tuple(total.shape)}: must be a 0-dim tensor, the sum of the losses; "
            "call .sum() on per-unit losses"
        )
    if not total.requires_grad:
        raise LossError(
            "total does not require a gradient: it is detached from the model, was computed under "
            "torch.no_grad(), or every parameter that it depends on is frozen"
        )
    return total


def check_units(units: object) -> Units:
    """The units themselves, or a LossError that says what is wrong with them."""
    if isinstance(units, Tensor):
        if units.dim() != 0:
            raise LossError(
                f"units of shape {tuple(units.shape)}: must be a number or a 0-dim tensor; "
                "call .sum() on per-sample weights"
            )
        if units.is_complex():
            raise LossError(f"units of dtype {units.dtype}: must be real")
        return units.detach()
    if isinstance(units, bool) or not isinstance(units, int | float):
        raise LossError(
            f"units={units!r}: must be a number or a 0-dim tensor, what the loss is a sum over "
            "(samples, tokens, weights)"
        )
    if not 0 <= units < float("inf"):
        raise LossError(f"units={units!r}: must be finite and not negative")
    return units


@dataclass(frozen=True)
class Term:
    """One named part of a loss: its sum, the units of that sum, and the weight of its mean."""

    total: Tensor
    units: Units
    weight: float = 1.0


@dataclass(frozen=True)
class Terms:
    """Several terms, each normalised by its own units over the window and over all ranks.

    Made by `Loss.terms`. The loss is the sum over terms of `weight * total / units`, with totals
    and units taken over the whole window.
    """

    by_name: Mapping[str, Term]


@dataclass(frozen=True)
class Loss:
    """A sum over units; the window's loss is the sum of totals over the sum of units.

    `units` may be a 0-dim tensor on the device: it is read once per window, not per micro-batch.
    """

    total: Tensor
    units: Units

    def __post_init__(self) -> None:
        check_total(self.total)
        check_units(self.units)

    @staticmethod
    def terms(terms: Mapping[str, tuple[Any, ...]]) -> Terms:
        """Terms with units of their own: `{"lm": (total, units), "aux": (total, units, weight)}`.

        Each is normalised by its own total over the window and over all ranks, so those totals
        must be countable before the first backward: give `WholeBatch` a `units=` function.
        """
        if not terms:
            raise LossError("wb.Loss.terms({}): give at least one term")
        parsed = {}
        for name, term in terms.items():
            if not isinstance(term, tuple) or len(term) not in (2, 3):
                raise LossError(
                    f"term {name!r} is {term!r}: must be (total, units) or (total, units, weight)"
                )
            weight = term[2] if len(term) == 3 else 1.0
            if isinstance(weight, bool) or not isinstance(weight, int | float):
                raise LossError(f"term {name!r} has weight {weight!r}: must be a number")
            parsed[name] = Term(check_total(term[0]), check_units(term[1]), float(weight))
        return Terms(parsed)


def as_loss(result: object) -> Loss | Terms:
    """What a loss function returned, as the contract: per-unit losses become sum over number."""
    if isinstance(result, Loss | Terms):
        return result
    if isinstance(result, Tensor):
        if result.dim() == 0:
            raise LossError(f"the loss function returned a bare scalar: {_SUM_OR_MEAN}")
        return Loss(result.sum(), result.numel())
    raise LossError(
        f"the loss function returned {type(result).__name__}: must be wb.Loss(total, units), "
        "wb.Loss.terms({...}) or a tensor of per-unit losses"
    )


def mean_loss(mean: Tensor, units: Units) -> Loss:
    """A loss that was computed as a mean over `units`, as the contract wants it.

    A micro-batch without any unit (all its tokens masked) has the mean 0/0; it contributes
    nothing here instead of a nan.
    """
    units = check_units(units)
    if isinstance(units, Tensor):
        total = torch.where(units == 0, mean.new_zeros(()), mean * units.to(mean.dtype))
        return Loss(total, units)
    return Loss(mean * units if units else mean.nan_to_num() * 0.0, units)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    *,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Loss:
    """Cross-entropy as a sum over the labels that count, with their number (or weight) as units.

    Classes are the last dimension (`logits[..., class]`, `labels[...]`) or, as in torch, the
    second (`logits[n, class, ...]`, `labels[n, ...]`); where both fit, the last is taken.
    The sum is made in float32 or better.
    """
    if logits.shape[:-1] == labels.shape:
        logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    elif logits.dim() < 2 or logits.shape[:1] + logits.shape[2:] != labels.shape:
        raise LossError(
            f"logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)}: "
            "must be [..., classes] and [...], or [n, classes, ...] and [n, ...]"
        )
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()  # a sum over thousands of tokens overflows fp16 and rounds in bf16
    total = functional.cross_entropy(
        logits,
        labels,
        weight=weight,
        ignore_index=ignore_index,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    counted = labels != ignore_index
    if weight is None:
        return Loss(total, counted.sum())
    return Loss(total, (weight[labels.where(counted, 0)] * counted).sum())


def causal_lm(model: Any, micro: Any) -> Loss:
    """Next-token loss of a language model on a micro-batch, over the tokens that count.

    `micro` is a mapping with `input_ids` and optionally `labels` (not shifted, -100 is ignored)
    and `attention_mask`, as Hugging Face models take it; or a pair `(inputs, targets)` whose
    targets are already shifted. Without labels, every token that is not masked is one.

    Where the logits would be large, they are made and used up in slices: for models that have
    `base_model` (which gives the last hidden states) and `get_output_embeddings()` (a linear layer
    whose output is the logits), as those of Hugging Face do.
    """
    if isinstance(micro, tuple | list) and len(micro) == 2:
        inputs, targets = micro
        return _next_token(model, lambda part: part(inputs), lambda: (inputs[:1, :4],), targets, 0)
    if not isinstance(micro, Mapping) or "input_ids" not in micro:
        raise LossError(
            f"micro-batch of type {type(micro).__name__}: wb.causal_lm takes a mapping with "
            "'input_ids' (and 'labels', 'attention_mask'), or a pair (inputs, targets)"
        )
    inputs = {name: value for name, value in micro.items() if name != "labels"}
    labels = micro.get("labels")
    if labels is None:
        labels = micro["input_ids"]
        if "attention_mask" in micro:
            labels = labels.masked_fill(micro["attention_mask"] == 0, -100)
    if not _takes_keywords(model):
        tokens = micro["input_ids"]
        return _next_token(model, lambda part: part(tokens), lambda: (tokens[:1, :4],), labels, 1)

    def tiny() -> dict[str, Tensor]:
        return {name: value[:1, :4] for name, value in inputs.items()}

    return _next_token(model, lambda part: part(**inputs), tiny, labels, 1)


def _next_token(
    model: Any,
    call: Callable[[Any], Any],
    tiny: Callable[[], tuple[Tensor, ...] | dict[str, Tensor]],
    labels: Tensor,
    shift: int,
) -> Loss:
    """Cross-entropy of `call(model)` with the labels `shift` places on; in slices if large."""
    head = _output_layer(model, tiny) if labels.numel() > 1024 else None
    if head is not None and labels.numel() > _rows_at_once(head.weight.shape[0]):
        hidden = getattr(out := call(model.base_model), "last_hidden_state", out)
        hidden = hidden[:, : hidden.shape[1] - shift].flatten(0, 1)
        return _sliced_cross_entropy(hidden, head, labels[:, shift:].flatten())
    logits = _logits(call(model))
    return cross_entropy(logits[:, : logits.shape[1] - shift], labels[:, shift:])


def _logits(output: Any) -> Tensor:
    logits = getattr(output, "logits", output)
    if isinstance(logits, tuple) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise LossError(
            f"the model returned {type(output).__name__}: wb.causal_lm needs logits of shape "
            "[samples, tokens, vocabulary], or an object with such .logits"
        )
    return logits


def _takes_keywords(model: Any) -> bool:
    forward = getattr(getattr(model, "module", model), "forward", model)
    parameters = inspect.signature(forward).parameters
    return "input_ids" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


# ------------------------------------------------- logits that are never there as a whole

_LOGITS_AT_ONCE = 1 << 26
_OUTPUT_LAYERS: WeakKeyDictionary[nn.Module, nn.Linear | None] = WeakKeyDictionary()


def _rows_at_once(vocabulary: int) -> int:
    """Tokens whose logits are made at once: enough to fill a matrix product, 256 MiB at most."""
    return max(1024, _LOGITS_AT_ONCE // vocabulary // 128 * 128)


def _output_layer(
    model: Any, tiny: Callable[[], tuple[Tensor, ...] | dict[str, Tensor]]
) -> nn.Linear | None:
    """The linear layer from `base_model`'s hidden states to the logits, if that is all there is.

    Some models scale or bend their logits afterwards. So it is looked at, once for each model and
    on a few tokens: the layer's input must be what `base_model` gave, its output the logits.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "base_model"):
        return None
    if model not in _OUTPUT_LAYERS:
        _OUTPUT_LAYERS[model] = _find_output_layer(model, tiny)
    return _OUTPUT_LAYERS[model]


def _find_output_layer(
    model: Any, tiny: Callable[[], tuple[Tensor, ...] | dict[str, Tensor]]
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
            logits = _logits(model(**few) if isinstance(few, dict) else model(*few))
        same = logits is seen["out"] and seen["given"].data_ptr() == seen["base"].data_ptr()
        return head if same and seen["given"].shape == seen["base"].shape else None
    except Exception:  # a model that cannot be asked keeps the plain way
        return None
    finally:
        for handle in handles:
            handle.remove()


def _sliced_cross_entropy(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Loss:
    weight: Tensor = head.weight
    bias: Tensor | None = head.bias
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    apply: Callable[..., Tensor] = _SlicedCrossEntropy.apply
    total = apply(hidden, weight, bias, labels)
    return Loss(total, (labels != -100).sum())


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
        rows = _rows_at_once(weight.shape[0])
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(labels), rows):
                h, y = hidden[start : start + rows], labels[start : start + rows, None]
                logits = functional.linear(h, weight, bias).to(wide)
                counted = y != -100
                y = y.where(counted, 0)
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
