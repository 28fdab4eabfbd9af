"""The Trainer around the mixin: its engine, its epochs, its memory, and what is refused of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.core.loss import Loss
from wholebatch.core.splitting import batch_size_of
from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.integrations.host_window import GradientsIn, refuse_shared_batches
from wholebatch.memory.budget import Memory, parse_memory
from wholebatch.memory.prediction_correction import choose_on_device

__all__ = [
    "EpochEnd",
    "engine_keeps",
    "most_that_fit",
    "refuse_own_batches",
    "refuse_unsupported",
    "stepped_here",
    "zero_loss",
]

_log = logging.getLogger("wholebatch")


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


def zero_loss(model: nn.Module) -> Tensor:
    """Return zero, with a gradient of zero for every parameter: engines wait for all of them."""
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


def engine_keeps(model: Any) -> GradientsIn:
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
    if engine_keeps(trainer.model_wrapped) != "elsewhere":
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


def refuse_unsupported(trainer: Any) -> None:
    """Refuse DataParallel, and ranks that share batches."""
    if trainer.args.n_gpu > 1:
        raise UnsupportedError(
            f"Trainer on {trainer.args.n_gpu} GPUs in one process (DataParallel), which averages "
            "the losses of its replicas: start one process per GPU (torchrun, accelerate launch)"
        )
    refuse_shared_batches(trainer.accelerator, "Trainer")


def most_that_fit(trainer: Any, inputs: Mapping[str, Any], memory: Memory | None) -> int:
    """Return the most samples of this batch that are predicted to fit, on every rank."""
    samples = batch_size_of(inputs)
    device = torch.device(trainer.args.device)
    if memory is None and device.type != "cuda":
        return samples
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    budget = parse_memory(
        "free" if memory is None else memory,
        device=device,
        held=sum(p.numel() * p.element_size() for p in model.parameters()),
    )
    precision = {"no": "full", "bf16": "bf16", "fp16": "fp16"}[trainer.accelerator.mixed_precision]
    optimizer = trainer.optimizer
    try:
        choice = choose_on_device(
            model,
            _model_loss,
            inputs,
            budget=budget,
            optimizer=getattr(optimizer, "optimizer", optimizer),
            precision=precision,
        )
    except UnsupportedError as error:
        _log.warning("memory cannot be predicted, so the whole batch is tried: %s", error)
        return samples
    _log.info("%s", choice.said())
    if not choice.fits:
        raise OptionError(f"not even one sample fits into the memory: {choice.said()}")
    chosen = torch.tensor([choice.micro_batch], device=device)
    return int(trainer.accelerator.gather(chosen).min())


def _model_loss(model: Any, inputs: Mapping[str, Any]) -> Loss:
    """Return the model's own loss; its units do not matter for the memory of a step."""
    outputs = model(**inputs)
    loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
    return Loss(loss, 1)
