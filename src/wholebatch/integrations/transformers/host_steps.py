"""Windows whose forwards and backwards the Trainer makes: FSDP, DeepSpeed, fp16, own steps.

The window weighs each loss (a mean over its own units) by its share of the window's units, which
are counted before the first forward, and holds what was announced against what came.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.batch import batch_size_of, split
from wholebatch.errors import LossError, OptionError, UnsupportedError
from wholebatch.integrations.host_window import AdapterOptions, FirstLook, GradientsIn, HostWindows
from wholebatch.losses.loss import Loss, Units, mean_loss
from wholebatch.stream import GivenLoss
from wholebatch.window.forward_state import replaced_attributes


@dataclass
class TrainerWindow:
    """The batches from which the Trainer makes its next update."""

    batches: Sequence[Any] = ()
    size: int = 0
    place: int = 0
    """The batches that are done."""
    counted: float | None = None
    """The units of the window on all ranks."""
    divisor: float = 1.0
    """The Trainer divides the sum over the whole batch by this number, usually the units."""
    operations: dict[Any, Any] = field(default_factory=dict)
    """The floating-point operations of a batch, by the shapes of its tensors."""

    @property
    def is_last(self) -> bool:
        """True if the next batch is the last one."""
        return self.place + 1 == self.size


class HostSteps:
    """The windows of one trainer and one optimizer, by the Trainer's own `training_step`."""

    def __init__(self, trainer: Any, why: str) -> None:
        if trainer.coupled is not None:
            raise OptionError(f"loss=wb.Coupled(...) is not possible where {why}")
        if trainer.micro_batch is not None and type(trainer.micro_batch) is not int:
            raise OptionError(
                f"micro_batch={trainer.micro_batch!r} is not possible where {why}: give a number "
                "of samples"
            )
        trainer.model_wrapped.train()
        self._trainer, self._model = trainer, trainer.model
        self.kept = engine_keeps(trainer.model_wrapped)
        norms = "refuse" if trainer.batchnorm == "exact" else trainer.batchnorm
        self.windows = HostWindows(
            [self._model],
            stepped_here(trainer),
            device=trainer.args.device,
            options=AdapterOptions(norms, "raise", trainer.nonfinite, trainer.audit),
            gradients=self.kept,
            owns_forward=True,
            scaled_by=trainer.accelerator,
        )
        off = "exact(..., audit=False)"
        self._look = FirstLook(self._model, self.windows, host=trainer, off=off)
        # DeepSpeed's engine divides by itself.
        self._knows_start = self.kept == "elsewhere" or not trainer.audit

    def step(self, model: nn.Module, inputs: Any, window: TrainerWindow, run: Any) -> Tensor:
        """Make the forward and backward of one batch by `run(model, inputs)`."""
        trainer, windows = self._trainer, self.windows
        if window.place == 0 and windows.open is not None:  # the Trainer has begun anew
            windows.discard()
        micros = [inputs]
        if trainer.micro_batch is not None:
            inputs = dict(inputs)
            micros = split(inputs, min(trainer.micro_batch, batch_size_of(inputs)))
        if len(micros) > 1 or window.size > 1 or windows.sync.ranks > 1:
            self._look_first(inputs, max(window.size, len(micros)))
        shares = []
        for index, micro in enumerate(micros):
            holds = index + 1 < len(micros)
            with (
                trainer.accelerator.no_sync(model) if holds else nullcontext(),
                self._weighing(window, is_last=window.is_last and not holds),
                windows.host_backward(),
            ):
                shares.append(run(model, micro))
        if windows.open is not None and window.is_last:
            windows.settle()
        return torch.stack(shares).sum()

    def _look_first(self, inputs: Any, steps: int) -> None:
        """Refuse a loss that does not add up, before the first window in parts."""
        trainer = self._trainer
        if not self._look.pending:
            return

        def run(few: Any) -> Loss:
            with trainer.compute_loss_context_manager():  # which may take the labels out of them
                mean: Any = trainer.compute_loss(self._model, copy.copy(few))
            return mean_loss(mean, trainer.count_units(few))

        how: dict[str, Any] = {"micro_batch": trainer.micro_batch, "steps": steps}
        self._look.at(run, trainer._prepared(inputs), **how)

    def _weighing(self, window: TrainerWindow, *, is_last: bool) -> AbstractContextManager[None]:
        """Return a context in which every loss is weighted by its share of the window's units.

        It replaces compute_loss on the instance, so that one that a subclass has overridden is
        weighted too. The Trainer's own division by the number of batches becomes one by 1.
        """
        trainer, inner = self._trainer, self._trainer.compute_loss

        @functools.wraps(inner)
        def weighed(
            model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            units = trainer.count_units(inputs)
            result = inner(model, inputs, return_outputs=return_outputs, num_items_in_batch=None)
            mean: Any = result[0] if return_outputs else result
            given = GivenLoss.of(mean=mean, units=units)
            loss = self._share_of(mean, units, window)
            self.windows.weigh(given, loss, announced=window.counted, is_last=is_last)
            if not self._knows_start and window.size > 1 and loss.requires_grad:
                loss.register_hook(functools.partial(self._refuse_divided, window.size))
            if is_last and self.kept == "elsewhere":
                self.windows.settle()  # its engine steps in the backward
            return (loss, *result[1:]) if return_outputs else loss

        replaced: dict[str, Any] = {"current_gradient_accumulation_steps": 1, **trainer.held}
        if trainer._prepares:
            replaced["_prepare_inputs"] = lambda inputs: inputs
        return replaced_attributes(trainer, compute_loss=weighed, **replaced)

    def _refuse_divided(self, size: int, gradient: Tensor) -> None:
        """Refuse a `training_step` that divides its loss by the number of batches itself."""
        self._knows_start = True
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        start = float(gradient) / (scaler.get_scale() if scaler is not None else 1.0)
        if math.isclose(start * size, 1.0, rel_tol=1e-3):
            raise LossError(
                f"training_step divides the loss by {size}, the number of batches of this window, "
                "and exact(...) divides by its units already: divide by "
                "self.current_gradient_accumulation_steps, which is 1 here, or not at all"
            )

    def _share_of(self, mean: Tensor, units: Units, window: TrainerWindow) -> Tensor:
        """Return what a loss adds to the window's mean; the engine will average over the ranks."""
        ranks = self._trainer.accelerator.num_processes
        if ranks > 1 and not units:
            return zero_loss(self._model)
        exact_units = units.double() if isinstance(units, Tensor) else units
        return mean_loss(mean, exact_units / window.divisor * ranks).total


def zero_loss(model: nn.Module) -> Tensor:
    """Return zero, with a gradient of zero for every parameter: engines wait for all of them."""
    zeros = [(one * 0.0).sum() for one in model.parameters() if one.requires_grad]
    return torch.stack([one.to(zeros[0].device, zeros[0].dtype) for one in zeros]).sum()


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
