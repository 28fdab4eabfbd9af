"""The next-token loss of a language model; large logits are made in slices."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor, nn

from wholebatch.errors import LossError
from wholebatch.losses import sliced_cross_entropy as slices
from wholebatch.losses.loss import Loss, cross_entropy

_log = logging.getLogger("wholebatch")

_bends_logits: WeakSet[Any] = WeakSet()
"""The models that do something to the logits of their output layer."""
_HEADS: dict[int, str] = {}
"""The names of the output layers of models that do not, as eager code has seen, by model."""


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
    rows, head = logits_of(model, labels, *args, **kwargs)
    if head is not None and rows.shape[:-1] == labels.shape:
        return slices.linear_cross_entropy(rows[:, :-1], head, labels[:, 1:])
    logits = rows if head is None else slices.applied(head, rows)
    return cross_entropy(logits[:, :-1], labels[:, 1:], dim=-1)


def logits_of(
    model: Any, labels: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, nn.Linear | None]:
    """Call a language model; return its logits, or what its output layer gets, and the layer.

    Where the logits are large, the output layer hands on what it is given. If the model returns
    just that, the loss applies the layer in slices. If it scales or bends the logits, it is called
    once more, and from then on it makes its logits itself.
    """
    if torch.compiler.is_dynamo_compiling():
        path = _HEADS.get(id(model))
        head: Any = model if path is None else model.get_submodule(path)
        # Two slices are slower than one product, and a graph needs few logits beside them.
        if path is None or labels.numel() <= 2 * slices.rows_at_once(head.out_features):
            return _logits(model(*args, **kwargs)), None
        owner, name = _owner_of(model, path)
        setattr(owner, name, _HANDS_ON)
        rows = _logits(model(*args, **kwargs))
        setattr(owner, name, head)
        return rows, head
    path = None if model in _bends_logits else _output_layer(model, labels)
    if path is None:
        return _logits(model(*args, **kwargs)), None
    owner, name = _owner_of(model, path)
    given: list[Tensor] = []
    head = getattr(owner, name)
    setattr(owner, name, _HandsOn(given))
    try:
        logits = _logits(model(*args, **kwargs))
        if len(given) == 1 and _is_itself(logits, given[0]):
            if id(model) not in _HEADS:
                finalize(model, _HEADS.pop, id(model), None)
            _HEADS[id(model)] = path
            return given[0], head
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # something needs numbers of the vocabulary
        _log.debug("%s makes its logits itself: %r", type(model).__name__, error)
    finally:
        setattr(owner, name, head)
    _bends_logits.add(model)
    _HEADS.pop(id(model), None)
    return _logits(model(*args, **kwargs)), None


class _HandsOn(nn.Module):
    """Stands for an output layer: returns what it is given, and appends it to `given`."""

    def __init__(self, given: list[Tensor] | None = None) -> None:
        super().__init__()
        self._given = given

    def forward(self, hidden: Tensor) -> Tensor:
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):  # here, and not where the loss is computed
            hidden = hidden.to(torch.get_autocast_dtype(kind))
        if self._given is not None:
            self._given.append(hidden)
        return hidden


_HANDS_ON = _HandsOn()


def _owner_of(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    owner, _, name = path.rpartition(".")
    return model.get_submodule(owner), name


def _is_itself(logits: Tensor, hidden: Tensor) -> bool:
    """True if a tensor is the other one, or a cast of it: a loss computes in float32 anyway."""
    cast = logits.grad_fn
    return logits is hidden or (
        logits.shape == hidden.shape
        and type(cast).__name__ == "ToCopyBackward0"
        and cast is not None
        and cast.next_functions[0][0] is hidden.grad_fn
    )


def in_slices(
    rows: Tensor,
    head: nn.Linear | None,
    labels: Tensor,
    of_rows: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
) -> list[Tensor]:
    """Return the sums that `of_rows(logits, labels)` gives, in slices if `head` makes the logits.

    Only the last logits have a label: prompt learning puts virtual tokens first.
    """
    if rows.shape[1] != labels.shape[1]:
        rows = rows[:, -labels.shape[1] :]
    if head is not None:
        return slices.sums_in_slices(rows.flatten(0, 1), head, labels.flatten(), of_rows)
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


def _output_layer(model: Any, labels: Tensor) -> str | None:
    """Return the name of the linear layer that makes the logits; None if they are few.

    And where it has hooks: engines that shard a model do so in hooks.
    """
    find = getattr(model, "get_output_embeddings", None)  # PEFT hands it on from the model inside.
    head = find() if callable(find) else None
    if type(head) is not nn.Linear or "forward" in vars(head):
        return None
    if any(m._forward_hooks or m._forward_pre_hooks for m in (model, head)):
        return None
    if labels.numel() <= slices.rows_at_once(head.out_features):
        return None
    return next((path for path, module in model.named_modules() if module is head), None)


def _logits(output: Any) -> Tensor:
    logits: Any = getattr(output, "logits", output)
    if isinstance(logits, tuple) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise LossError(
            f"the model returned {type(output).__name__}: wb.causal_lm needs logits of shape "
            "[samples, tokens, vocabulary], or an object with such .logits"
        )
    return logits
