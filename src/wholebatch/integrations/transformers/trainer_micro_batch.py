"""How many samples of a Trainer's batch fit into memory at once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from wholebatch.core.loss import Loss
from wholebatch.core.splitting import batch_size_of
from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.memory.budget import Budget, parse_memory
from wholebatch.memory.prediction_correction import choose_on_device

__all__ = ["most_that_fit"]

_log = logging.getLogger("wholebatch")


def most_that_fit(trainer: Any, inputs: dict[str, Any], memory: Budget | None) -> int:
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
            trainer._ready(inputs),
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
    """What a step of the model costs in memory; the number of units does not matter for that."""
    outputs = model(**inputs)
    loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
    return Loss(loss, 1)
