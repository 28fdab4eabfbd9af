"""What the mixin must know of the Trainer around it: its counts, its epochs, what it cannot do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.errors import UnsupportedError
from wholebatch.integrations.host_window import Gradients

__all__ = [
    "EpochEnd",
    "check",
    "hosts_count",
    "is_scaled",
    "kept_in",
    "nothing_through",
    "refuse_own_batches",
    "stepped_here",
]


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
