"""Exact windows with the Trainer's own steps (FSDP, DeepSpeed, fp16, your `training_step`).

The units of a window are counted before its first forward. So the exact weight of each batch's mean
is known when the loss is computed: `units × ranks / units of the window`. Every engine that
averages gradients over its ranks then gives the update of the undivided batch.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from wholebatch.audit.divided_by_steps import step_division
from wholebatch.audit.loss_test import LossTest
from wholebatch.audit.scalar_graph import parts_of
from wholebatch.coupled import choose as choose_batchnorm
from wholebatch.distributed.process_group import Group
from wholebatch.errors import LossError, NonFiniteError, OptionError, UnsupportedError
from wholebatch.losses.loss import Loss, mean_loss
from wholebatch.options import Close
from wholebatch.warn_user import warn_user
from wholebatch.window.forward_state import attributes_restored
from wholebatch.window.precision import SIXTEEN_BIT
from wholebatch.window.replaced_attributes import replaced_attributes


@dataclass
class TrainerWindow:
    """The batches from which the Trainer makes its next update."""

    batches: Sequence[Any] = ()
    size: int = 0
    place: int = 0
    """The batches that are done."""
    counted: float | None = None
    """The units of the window on all ranks."""
    counted_here: float = 0.0
    """Its units on this rank."""
    weighted: float | Tensor = 0.0
    """The units of the losses that were weighted, on this rank."""

    @property
    def is_last(self) -> bool:
        """True if the next batch is the last one."""
        return self.place + 1 == self.size


def engine_of(model: Any) -> Literal["replicated", "sharded", "deepspeed"]:
    """Return the kind of engine that wraps the model; a plain model is a replica too."""
    if hasattr(model, "zero_optimization_stage"):
        return "deepspeed"
    sharded = hasattr(model, "set_requires_gradient_sync") or "Fully" in type(model).__name__
    return "sharded" if sharded else "replicated"


class WeightedLoss:
    """The losses of one trainer and one optimizer, weighted for the Trainer's own steps."""

    def __init__(self, trainer: Any, why: str) -> None:
        _refuse_options(trainer, why)
        self._trainer, self._model = trainer, trainer.model
        trainer.model_wrapped.train()
        engine = engine_of(trainer.model_wrapped)
        self._check_dtypes(engine)
        norms = "refuse" if trainer.batchnorm == "exact" else trainer.batchnorm
        self._batchnorm = choose_batchnorm(norms, self._model)
        self._test = LossTest(
            self._model,
            Group(),
            enabled=trainer.audit,
            shares_forwards=engine != "replicated",
            off="exact(..., audit=False)",
        )
        self._warns_of_division = trainer.audit
        # DeepSpeed's engine divides by itself, and shows no gradient before its step.
        self._is_deepspeed = engine == "deepspeed"
        self._knows_start = self._is_deepspeed or not trainer.audit
        self._hook = None
        if not self._is_deepspeed:
            optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
            self._hook = optimizer.register_step_pre_hook(_refuse_not_finite)

    def detach(self) -> None:
        """Leave the optimizer as it was found."""
        if self._hook is not None:
            self._hook.remove()

    def _check_dtypes(self, engine: str) -> None:
        """Refuse an engine that adds 16-bit gradients in 16 bit."""
        if engine == "deepspeed":
            model, sums = self._trainer.model_wrapped.get_data_types()
            if model != torch.float32 and sums != torch.float32:
                raise UnsupportedError(
                    f"DeepSpeed with parameters in {model} adds their gradients in {sums}: set "
                    '"data_types": {"grad_accum_dtype": "fp32"} in its configuration'
                )
        elif engine == "sharded":
            from wholebatch.distributed.fsdp import check_dtypes

            check_dtypes(self._model)
        elif any(p.dtype in SIXTEEN_BIT for p in self._model.parameters() if p.requires_grad):
            raise UnsupportedError(
                "16-bit parameters and steps by the Trainer itself, which adds their gradients in "
                "16 bit: keep the parameters in float32 (bf16=True computes in bf16), or leave "
                "training_step to the Trainer"
            )

    def step(self, model: nn.Module, inputs: Any, window: TrainerWindow, run: Any) -> Tensor:
        """Make the forward and backward of one batch by `run(model, inputs)`."""
        if window.place == 0:
            self._batchnorm.begin_window()
        in_parts = window.size > 1 or self._trainer.accelerator.num_processes > 1
        if window.place == 0 and in_parts and self._test.begin_window():
            self._test_window(inputs)
        with self._weighing(window):
            share: Tensor = run(model, inputs)
        if window.is_last and not math.isclose(window.weighted, window.counted_here, rel_tol=1e-9):
            raise LossError(
                f"the Trainer counted {window.counted_here:g} units in this window, and the losses "
                f"of training_step are over {float(window.weighted):g}: it must compute the loss "
                "of every batch once, by self.compute_loss, on the same inputs"
            )
        return share

    def _test_window(self, inputs: Any) -> None:
        """Refuse a loss that does not add up, in windows 1, 2, 4, 8, ..."""
        trainer = self._trainer

        def run(few: Any) -> Loss:
            with trainer.compute_loss_context_manager():  # which may take the labels out of them
                mean: Any = trainer.compute_loss(self._model, copy.copy(few))
            return mean_loss(mean, trainer.count_units(few))

        batch = trainer._prepared(inputs)
        with attributes_restored(trainer):
            self._test.test(run, batch, [batch], name="the loss")

    def _weighing(self, window: TrainerWindow) -> AbstractContextManager[None]:
        """Return a context in which every loss is weighted by its share of the window's units.

        It replaces compute_loss on the instance, so that a subclass's own one is weighted too. The
        Trainer's own division by the number of batches becomes one by 1.
        """
        trainer, inner = self._trainer, self._trainer.compute_loss

        @functools.wraps(inner)
        def weighted(
            model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            units = trainer.count_units(inputs) if window.place < window.size else 0
            result = inner(model, inputs, return_outputs=return_outputs, num_items_in_batch=None)
            window.weighted = window.weighted + units
            mean = result[0] if return_outputs else result
            self._warn_of_division(mean, window.size)
            loss = self._share_of(mean, units, window)
            if not self._knows_start and window.size > 1 and loss.requires_grad:
                loss.register_hook(functools.partial(self._refuse_divided, window.size))
            return (loss, *result[1:]) if return_outputs else loss

        replaced: dict[str, Any] = {"current_gradient_accumulation_steps": 1}
        if trainer._prepares:
            replaced["_prepare_inputs"] = lambda inputs: inputs
        return replaced_attributes(trainer, compute_loss=weighted, **replaced)

    def _warn_of_division(self, mean: Tensor, steps: int) -> None:
        """Warn of a first loss that is divided by the number of steps."""
        warns, self._warns_of_division = self._warns_of_division, False
        warning = step_division(parts_of(mean), None, [steps]) if warns else None
        if warning is not None:
            warn_user(warning)

    def _share_of(self, mean: Tensor, units: Any, window: TrainerWindow) -> Tensor:
        """Return what a loss adds to the window's mean; the engine will average over the ranks."""
        if self._is_deepspeed and not math.isfinite(mean):
            raise NonFiniteError(
                f"batch {window.place + 1} of {window.size} of this window has a loss of "
                f"{float(mean):g}, so there is no update. Fix the batch or the model"
            )
        ranks = self._trainer.accelerator.num_processes
        if not units and (ranks > 1 or window.place >= window.size):
            return zero_loss(self._model)
        exact_units = units.double() if isinstance(units, Tensor) else units
        assert window.counted is not None
        return mean_loss(mean, exact_units / window.counted * ranks).total

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


def _refuse_options(trainer: Any, why: str) -> None:
    """Refuse the options that need the window's forwards and steps to be ours."""
    instead = f"is not possible if the Trainer runs the steps ({why})"
    if trainer.coupled is not None:
        raise OptionError(f"loss=wb.Coupled(...) {instead}: use one process or DDP")
    if trainer.micro_batch is not None:
        raise OptionError(
            f"micro_batch={trainer.micro_batch!r} {instead}: set per_device_train_batch_size and "
            "gradient_accumulation_steps instead"
        )
    if trainer.window_close != Close():
        raise OptionError(f"close={trainer.window_close!r} {instead}: leave close= out")


@torch.no_grad()
def _refuse_not_finite(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Refuse a step on gradients that are not finite; a GradScaler skips such a step itself."""
    held = [p.grad for group in optimizer.param_groups for p in group["params"]]
    norm: Any = get_total_norm([gradient for gradient in held if gradient is not None])
    if not math.isfinite(norm.full_tensor() if hasattr(norm, "full_tensor") else norm):
        raise NonFiniteError(
            "the gradient of this window is not finite, although its losses are, so there is no "
            "update. Clip, lower the learning rate, or search for a division by zero"
        )


def zero_loss(model: nn.Module) -> Tensor:
    """Return zero, with a gradient of zero for every parameter: engines wait for all of them."""
    zeros = [(parameter * 0.0).sum() for parameter in model.parameters() if parameter.requires_grad]
    return torch.stack([zero.to(zeros[0].device, zeros[0].dtype) for zero in zeros]).sum()
