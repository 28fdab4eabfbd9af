"""What the loss of a Trainer is a mean over: every label that counts, or those from the second on.

A causal language model's loss compares the logits of place t with the label of place t + 1, so the
first label of a sample never counts. Transformers says which of its losses do that. A loss that it
does not know is measured once, before the first step: the mean over two sets of places must be the
mean of their means, weighed by how many labels each has; only the right count makes it so.


What the mixin must know of the Trainer around it: its counts, its epochs, what it cannot do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.errors import LossError, NonFiniteError, UnsupportedError
from wholebatch.integrations.host_window import Gradients

__all__ = [
    "EpochEnd",
    "check",
    "count_labels",
    "hosts_count",
    "is_encoder_decoder",
    "is_scaled",
    "kept_in",
    "knows_loss",
    "measured_shift",
    "nothing_through",
    "refuse_own_batches",
    "shifts_labels",
    "stepped_here",
]

_HELP = "pass exact(Trainer, units=a function of the batch's inputs) that counts it"
_LIBRARIES = ("transformers.", "trl.")
# What rounding leaves of the right count's residual is far below this.
_AGREES = 1e-4


def count_labels(inputs: Mapping[str, Any], shifts: Callable[[], bool]) -> int | Tensor:
    """The labels of these inputs that count."""
    labels = inputs.get("shift_labels", inputs.get("labels"))
    if not isinstance(labels, Tensor):
        raise LossError(
            "nothing says what the loss is a mean over: the batch has no tensor of 'labels'; "
            f"{_HELP}"
        )
    if labels.is_floating_point():  # a regression, or several labels at once
        return labels.numel()
    if "shift_labels" not in inputs and labels.dim() > 1 and shifts():
        labels = labels[..., 1:]
    return (labels != -100).sum()


def knows_loss(trainer: Any) -> bool:
    """Whether the loss is one of the library's own, of a kind that it has on its list."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    if trainer.compute_loss_func is not None:
        return False
    home: str = getattr(trainer.compute_loss, "__module__", "") or ""
    if not home.startswith(_LIBRARIES):
        return False
    return home.startswith("trl.") or getattr(_inner(trainer), "loss_type", None) in LOSS_MAPPING


def shifts_labels(trainer: Any) -> bool:
    """Whether a loss of the library's own compares place t with label t + 1."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    if is_encoder_decoder(trainer):
        return False
    home: str = getattr(trainer.compute_loss, "__module__", "") or ""
    kind = LOSS_MAPPING.get(getattr(_inner(trainer), "loss_type", None) or "")
    return home.startswith("trl.") or kind is ForCausalLMLoss


def is_encoder_decoder(trainer: Any) -> bool:
    config = getattr(_inner(trainer), "config", None)
    return bool(getattr(config, "is_encoder_decoder", False))


def measured_shift(mean_of: Callable[[dict[str, Any]], Tensor], inputs: Mapping[str, Any]) -> bool:
    """Whether the loss leaves out the first label, found out on these inputs.

    Labels are kept at places 0 and 1 of all samples, at 2 and 3 of every other one, and at both.
    If the first never counts, the first set has 1 label per sample, else 2; the second has 2 per
    sample that it is in. A mean of the samples' own means fits neither.
    """
    labels: Tensor = inputs["labels"]
    if labels.dim() != 2 or labels.shape[-1] < 4:
        raise LossError(
            f"the loss is not one that Transformers knows, and labels of shape "
            f"{tuple(labels.shape)} do not let us find out what it is a mean over: {_HELP}"
        )
    rows, places = labels.shape[0], torch.arange(labels.shape[-1], device=labels.device)
    even = torch.arange(rows, device=labels.device)[:, None] % 2 == 0
    first_set, second_set = places < 2, even & (places > 1) & (places < 4)
    valid = labels.where(labels != -100, 0)

    def mean_at(kept: Tensor) -> float:
        return float(mean_of({**inputs, "labels": valid.where(kept, -100)}))

    first, second, both = map(mean_at, (first_set, second_set, first_set | second_set))
    if not all(map(math.isfinite, (first, second, both))):
        raise NonFiniteError(
            f"the loss is {both:g} on this batch, so it cannot be found out what it is a mean "
            f"over: mend the batch or the model (its first update was not made yet), or {_HELP}"
        )
    in_second = 2 * ((rows + 1) // 2)
    residual = {}
    for shifted, in_first in ((True, rows), (False, 2 * rows)):
        total = (in_first + in_second) * both
        residual[shifted] = abs(total - in_first * first - in_second * second) / abs(total)
    best = min(residual, key=residual.__getitem__)
    if not (residual[best] <= _AGREES and residual[not best] >= 10 * residual[best]):
        raise LossError(
            "the loss is not the mean over the labels that are not -100, shifted or not, so "
            f"nothing says what its units are: {_HELP}"
        )
    return best


def _inner(trainer: Any) -> Any:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class EpochEnd(int):
    """The number of batches in an epoch, which a loader without a length tells when it runs out.

    The Trainer steps after every `gradient_accumulation_steps` batches, and after the epoch's last
    one: `(step + 1) == steps_in_epoch`. Without a length that number is a guess, no batch is the
    last one, and the gradient of a short last window would leak into the next epoch.
    """

    found: int | None = None

    def __eq__(self, other: object) -> bool:
        return other == (int(self) if self.found is None else self.found)

    def __ne__(self, other: object) -> bool:  # int has one of its own
        return not self == other

    __hash__ = int.__hash__


def hosts_count(trainer: Any, batches: Iterable[Mapping[str, Any]]) -> Tensor | None:
    """What the Trainer itself would divide a window's loss by, on this rank; None if by nothing."""
    if not (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None):
        return None
    counts = []
    for inputs in batches:
        labels = inputs.get("shift_labels", inputs.get("labels"))
        if not isinstance(labels, Tensor):
            return None
        if "shift_labels" not in inputs and getattr(trainer, "_loss_shifts_labels", False):
            labels = labels[..., 1:]
        counts.append(labels.ne(-100).sum())
    return torch.stack(counts).sum().double() if counts else None


def nothing_through(model: nn.Module) -> Tensor:
    """Zero, with a gradient of zero for every parameter: engines wait for all of them."""
    zeros = [(one * 0.0).sum() for one in model.parameters() if one.requires_grad]
    return torch.stack([one.to(zeros[0].device, zeros[0].dtype) for one in zeros]).sum()


def refuse_own_batches(trainer: type[Any]) -> None:
    """Refuse a trainer of TRL's that makes its batches, and counts them, itself (GRPO)."""
    kind = next((one for one in trainer.__mro__ if "_prepare_inputs" in vars(one)), None)
    if kind is None or not kind.__module__.startswith("trl."):
        return
    raise UnsupportedError(
        f"exact({kind.__name__}): it generates its batches itself, in _prepare_inputs, and TRL's "
        "default loss is divided by the tokens of all of them, so its update is that of the whole "
        f"batch already: use {kind.__name__} as it is, with its default loss_type"
    )


def kept_in(model: Any) -> Gradients:
    """Return where the engine that wraps the model keeps gradients within a window."""
    if hasattr(model, "zero_optimization_stage"):
        return "elsewhere"
    sharded = hasattr(model, "set_requires_gradient_sync") or "Fully" in type(model).__name__
    return "sharded" if sharded else "whole"


def stepped_here(trainer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers whose parameters hold their gradients; DeepSpeed's engine has its own.

    Refuse an engine that adds 16-bit gradients in 16 bit, or that cannot leave out a step.
    """
    optimizer = trainer.optimizer
    if kept_in(trainer.model_wrapped) != "elsewhere":
        return [getattr(optimizer, "optimizer", optimizer)]
    model, sums = trainer.model_wrapped.get_data_types()
    if model != torch.float32 and sums != torch.float32:
        raise UnsupportedError(
            f"DeepSpeed with parameters in {model} adds their gradients in {sums}: set "
            '"data_types": {"grad_accum_dtype": "fp32"} in its configuration'
        )
    if trainer.nonfinite == "skip":
        raise UnsupportedError(
            'nonfinite="skip" with DeepSpeed, whose engine steps within the last backward: leave '
            'it at "raise"'
        )
    return []


def is_scaled(accelerator: Any) -> bool:
    """Say whether Accelerate scales the loss, as fp16 needs it."""
    scaler = getattr(accelerator, "scaler", None)
    return scaler is not None and bool(scaler.is_enabled())


def check(trainer: Any) -> None:
    if trainer.args.n_gpu > 1:
        raise UnsupportedError(
            f"Trainer on {trainer.args.n_gpu} GPUs in one process (DataParallel), which averages "
            "the losses of its replicas: start one process per GPU (torchrun, accelerate launch)"
        )
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    for name in ("tp", "cp", "sp"):
        if parallel is not None and getattr(parallel, f"{name}_size", 1) > 1:
            raise UnsupportedError(
                f"Trainer with {name}_size={getattr(parallel, f'{name}_size')}: units would be "
                "counted more than once over ranks that share a batch; use data parallelism alone"
            )
