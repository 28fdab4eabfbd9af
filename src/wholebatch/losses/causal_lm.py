"""The next-token loss of a language model; large logits are made in slices."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wholebatch.errors import LossError
from wholebatch.losses import sliced_cross_entropy as slices
from wholebatch.losses.loss import Loss, cross_entropy


def causal_lm(model: Any, micro: Any) -> Loss:
    """Return the next-token loss of a language model, over the tokens that count.

    `micro` is a mapping with `input_ids` and optionally `labels` (not shifted, -100 is ignored)
    and `attention_mask`, as Hugging Face models take it. Without labels, every token that is not
    masked is one. A model whose `forward` has another name for the tokens gets them as its first
    argument, and of the rest what it has a parameter for.

    Large logits are computed in slices, so they are never all in memory. This needs a model with
    `get_output_embeddings()`, such as those of Hugging Face, whose linear output layer alone makes
    the logits. For another model use `wb.linear_cross_entropy`.

    Args:
        model: The language model.
        micro: The micro-batch.
    """
    if not isinstance(micro, Mapping) or "input_ids" not in micro:
        raise LossError(
            f"micro-batch of type {type(micro).__name__}: wb.causal_lm takes a mapping with "
            "'input_ids' (and 'labels', 'attention_mask'). For targets that are shifted already, "
            "return wb.cross_entropy(model(inputs), targets)"
        )
    labels = micro.get("labels")
    if labels is None:
        labels = micro["input_ids"]
        if "attention_mask" in micro:
            labels = labels.masked_fill(micro["attention_mask"] == 0, -100)
    args, kwargs = _arguments(model, micro)
    logits = logits_of(model, labels, *args, **kwargs)
    if isinstance(logits, LateLogits):
        hidden = logits.hidden
        if hidden.shape[:-1] == labels.shape:
            return slices.linear_cross_entropy(hidden[:, :-1], logits.head, labels[:, 1:])
        logits = logits.computed
    return cross_entropy(logits[:, :-1], labels[:, 1:], dim=-1)


def logits_of(model: Any, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor | LateLogits:
    """Call a language model; return its logits, or what makes them where they are large."""
    head = _output_layer(model, labels)
    with ExitStack() as stack:
        if head is not None:
            stack.callback(vars(head).pop, "forward")
            vars(head)["forward"] = lambda hidden: LateLogits(hidden, head)
        return _logits(model(*args, **kwargs))


def in_slices(
    logits: Tensor | LateLogits,
    labels: Tensor,
    of_rows: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
) -> list[Tensor]:
    """Return the sums that `of_rows(logits, labels)` gives, in slices where the logits are large.

    Only the last logits have a label: prompt learning puts virtual tokens first.
    """
    rows = logits.hidden if isinstance(logits, LateLogits) else logits
    if rows.shape[1] != labels.shape[1]:
        rows = rows[:, -labels.shape[1] :]
    if isinstance(logits, LateLogits):
        return slices.sums_in_slices(rows.flatten(0, 1), logits.head, labels.flatten(), of_rows)
    return list(of_rows(rows.flatten(0, 1), labels.flatten()))


def _arguments(model: Any, micro: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return what the model is called with: all but the labels."""
    inputs = {name: value for name, value in micro.items() if name != "labels"}
    forward = getattr(getattr(model, "module", model), "forward", model)
    parameters = inspect.signature(forward).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    is_named = takes_all and kinds[0] is not inspect.Parameter.POSITIONAL_OR_KEYWORD
    if "input_ids" in parameters or is_named:
        return [], inputs
    tokens = inputs.pop("input_ids")
    return [tokens], {k: v for k, v in inputs.items() if takes_all or k in parameters}


def _output_layer(model: Any, labels: Tensor) -> nn.Linear | None:
    """Return the linear layer that makes the logits; None if they are few, or it has hooks.

    Engines that shard a model do so in hooks. Dynamo, which allocates nothing, follows the model as
    it is: torch 2.11 does not follow a `forward` that is put back.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    find = getattr(model, "get_output_embeddings", None)  # PEFT hands it on from the model inside.
    head = find() if callable(find) else None
    if type(head) is not nn.Linear or "forward" in vars(head):
        return None
    if any(m._forward_hooks or m._forward_pre_hooks for m in (model, head)):
        return None
    return head if labels.numel() > slices.rows_at_once(head.out_features) else None


def _logits(output: Any) -> Any:
    logits = getattr(output, "logits", output)
    if isinstance(logits, tuple) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor | LateLogits) or logits.dim() != 3:
        raise LossError(
            f"the model returned {type(output).__name__}: wb.causal_lm needs logits of shape "
            "[samples, tokens, vocabulary], or an object with such .logits"
        )
    return logits


class LateLogits:
    """Logits that are computed when something uses them: a model may scale or bend them.

    Otherwise the loss computes them, in slices.
    """

    def __init__(self, hidden: Tensor, head: nn.Linear, *, in_full: bool = False) -> None:
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):  # here, and not where they are used
            hidden = hidden.to(torch.get_autocast_dtype(kind))
        self.hidden, self.head = hidden, head
        self.dtype = torch.float32 if in_full else hidden.dtype
        self._computed: Tensor | None = None

    @property
    def computed(self) -> Tensor:
        """The logits themselves."""
        if self._computed is None:  # Dynamo cannot follow a cached_property of Python 3.11.
            dtype, bias = self.hidden.dtype, self.head.bias
            with torch.autocast(self.hidden.device.type, enabled=False):
                cast = None if bias is None else bias.to(dtype)
                computed = functional.linear(self.hidden, self.head.weight.to(dtype), cast)
                self._computed = computed.to(self.dtype)
        return self._computed

    def float(self) -> Any:
        """Return them in float32, as Accelerate casts outputs: a loss computes in it anyway."""
        if self.dtype is torch.float64:
            return self.computed.float()
        return LateLogits(self.hidden, self.head, in_full=True)

    def dim(self) -> int:
        return self.hidden.dim()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.computed, name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*map(_computed, args), **_computed(kwargs or {}))


def _computed(value: Any) -> Any:
    """Return the value with all logits in it computed."""
    if isinstance(value, list | tuple):
        return type(value)(map(_computed, value))
    if isinstance(value, dict):
        return {name: _computed(held) for name, held in value.items()}
    return value.computed if isinstance(value, LateLogits) else value


def _operator(name: str) -> Any:
    return lambda self, *others: getattr(self.computed, name)(*map(_computed, others))


_OPERATORS = (
    "getitem setitem neg abs add radd sub rsub mul rmul truediv rtruediv floordiv pow rpow matmul "
    "rmatmul lt le gt ge eq ne len"
)
for _name in _OPERATORS.split():
    setattr(LateLogits, f"__{_name}__", _operator(f"__{_name}__"))
