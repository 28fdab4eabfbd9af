"""Units of a Trainer's loss: the labels that are not -100.

A causal language model compares the logits of place t with the label of place t + 1, so the first
label of a sample never counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from wholebatch.errors import LossError

_LIBRARIES = ("transformers.", "trl.")


def count_labels(inputs: Mapping[str, Any], shifts: Callable[[], bool]) -> int | Tensor:
    """Return how many labels of these inputs count; `shifts()`: the first of a sample does not."""
    labels = inputs.get("shift_labels", inputs.get("labels"))
    if not isinstance(labels, Tensor):
        raise LossError(
            "wholebatch does not know what the loss is a mean over: the batch has no tensor of "
            "'labels'; pass exact(Trainer, units=a function of the batch's inputs) that counts it"
        )
    if labels.is_floating_point():  # a regression, or several labels at once
        return labels.numel()
    if "shift_labels" not in inputs and labels.dim() > 1 and shifts():
        labels = labels[..., 1:]
    return (labels != -100).sum()


def shifts_labels(trainer: Any) -> bool:
    """Return True if the loss compares place t with label t + 1.

    That is known of the losses of Transformers and TRL. Refuse to guess it of any other.
    """
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    model = trainer.accelerator.unwrap_model(trainer.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    home: str = getattr(trainer.compute_loss, "__module__", "") or ""
    if trainer.compute_loss_func is None and home.startswith(_LIBRARIES):
        if home.startswith("trl."):
            return True
        loss = LOSS_MAPPING.get(getattr(model, "loss_type", None) or "")
        if (
            loss is None
            and "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names
        ):
            loss = model.loss_function
        if loss is not None:
            return bool(loss is ForCausalLMLoss)
    whose = "compute_loss_func" if trainer.compute_loss_func is not None else "compute_loss"
    raise LossError(
        f"the loss is not one of Transformers' own ({whose} of {home or type(trainer).__name__} "
        f"with {type(model).__name__}), and its labels have two dimensions. Pass what it is a mean "
        'over: exact(Trainer, units=lambda inputs: (inputs["labels"] != -100).sum()), or '
        'inputs["labels"][:, 1:] if position t predicts label t + 1'
    )
