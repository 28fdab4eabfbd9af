"""`ExactTrainerMixin`: a Trainer whose every update is that of the undivided global batch.

The Trainer reads all batches of a window before its first forward. So at the window's first
`training_step` all of it runs, as in `WholeBatch.gradient`: micro-batches as compiled or recorded
graphs, recovery from out-of-memory, exact BatchNorm. The gradient is left in `.grad`, for the
Trainer to clip and step; the window's other calls of `training_step` return the losses recorded.
That needs nothing of the model: whether it accepts `num_items_in_batch` or not, whether the loss is
its own, a `compute_loss_func` or an overridden `compute_loss`.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from wholebatch.batch.samples import layout_of
from wholebatch.compile import Execute
from wholebatch.errors import EmptyWindowError, UnsupportedError
from wholebatch.integrations.handed_over import refuse_shared_batches, samples_of_last_batches
from wholebatch.integrations.transformers.given_windows import GivenWindows
from wholebatch.integrations.transformers.label_units import count_labels, shifts_labels
from wholebatch.integrations.transformers.weighted_loss import (
    TrainerWindow,
    WeightedLoss,
    engine_of,
)
from wholebatch.losses.coupled import Coupled
from wholebatch.losses.loss import Loss, Units, check_units, mean_loss
from wholebatch.memory.budget import Budget
from wholebatch.options import Close, Memory, Samples
from wholebatch.whole_batch import MicroBatch
from wholebatch.window.close import read_scalars
from wholebatch.window.replaced_attributes import replaced_attributes

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:  # At run time the mixin precedes the Trainer in the MRO.
    _Trainer = object


_log = logging.getLogger("wholebatch")

UnitsFunction: TypeAlias = Callable[[Mapping[str, Any]], Units]
# The training_step of these TRL trainers only adds offloading of activations.
_STEPS_OF_TRL = {"SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer"}


class ExactTrainerMixin(_Trainer):
    """The mixin that `exact` adds to a trainer. Use it to write the class yourself:

    ```python
    class MyTrainer(ExactTrainerMixin, Trainer):
        units_of = staticmethod(lambda inputs: inputs["weights"].sum())
    ```
    """

    units_of: UnitsFunction | None = None
    coupled: Coupled | None = None
    execute: Execute = "auto"
    micro_batch: MicroBatch | Samples | None = None
    memory: Memory | Budget | None = None
    batchnorm: str = "exact"
    window_close: Close = Close()
    audit: bool = True
    takes_parts = True
    """True if ranks may have batches of different sizes."""
    _shift: bool | None = None
    _is_counting = False
    _open = TrainerWindow()
    _whole: GivenWindows | None = None
    _weighted: WeightedLoss | None = None
    _made_for_optimizer: Any = None
    _shares: Sequence[Tensor] = ()  # of each batch in the window's mean
    _operations: dict[Any, int]  # of a batch, by the shapes of its tensors

    # ------------------------------------------------------------------ units

    def count_units(self, inputs: Mapping[str, Any]) -> Units:
        """Return how many units the loss of these inputs is a mean over."""
        if self.units_of is not None:
            return check_units(self.units_of(inputs))
        return count_labels(inputs, self._shifts_labels)

    def _shifts_labels(self) -> bool:
        """Return True if the first label of a sample never counts."""
        if self._shift is None:
            self._shift = shifts_labels(self)
        return self._shift

    @property
    def _prepares(self) -> bool:
        """True if `_prepare_inputs` is the user's own, which may change what is counted."""
        home: str = getattr(self._prepare_inputs, "__module__", "") or ""
        return not home.startswith("transformers.")

    def _prepared(self, inputs: Any) -> Any:
        """Return the inputs as the loss gets them; a preparation of the user's own is done."""
        return inputs if self._prepares else self._prepare_inputs(inputs)

    def prepare_window(self, batches: list[Any]) -> None:
        """Prepare all batches of a window, if that may change what is counted or what they are."""
        refuse_own_batches(type(self))
        if self._prepares:
            self.model_wrapped.train()
            batches[:] = [self._prepare_inputs(inputs) for inputs in batches]

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of the next window; count their units on the way."""
        self._open, self._is_counting = TrainerWindow(), True
        try:
            samples, _ = batches = super().get_batch_samples(*args, **kwargs)
        finally:
            self._is_counting = False
        self._open.batches, self._open.size = list(samples), len(samples)
        asked = args[1] if len(args) > 1 else kwargs["num_batches"]
        # A loader without a length has run out: the Trainer steps only after as many as it asked
        # for, so the last one is given again, and does not count.
        samples += samples[-1:] * (asked - len(samples))
        return batches

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if not self._is_counting:
            return super()._get_num_items_in_batch(batch_samples, device)
        if not batch_samples:
            return None
        leave_out_repeated(self, batch_samples)
        self.prepare_window(batch_samples)
        if self.coupled is not None:  # its loss brings its units
            return None
        units = read_scalars([self.count_units(inputs) for inputs in batch_samples])
        self._open.counted = self._open.counted_here = math.fsum(units)
        counted = torch.tensor(self._open.counted, dtype=torch.float64, device=device)
        if self.accelerator.num_processes > 1:
            counted = self.accelerator.gather(counted.reshape(1)).sum()
            self._open.counted = float(counted)
        return counted

    # ------------------------------------------------------------- the window

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Return this batch's share of the window's mean; the first call makes the gradient."""
        window = self._open
        if window.place == 0:
            self._make_windows(model)
        if self._weighted is not None:
            step = functools.partial(super().training_step, num_items_in_batch=num_items_in_batch)
            share = self._weighted.step(model, inputs, window, step)
        else:
            assert self._whole is not None
            if window.place == 0:
                self._shares = self._run_window(self._whole, model)
            elif window.is_last:
                self._whole.check_untouched()
            share = self._shares[min(window.place, window.size - 1)]
            share = share if window.place < window.size else 0 * share
        window.place += 1
        return share

    def _make_windows(self, model: nn.Module) -> None:
        """Choose who makes the gradients of this optimizer's windows, once."""
        refuse_unsupported(self)
        if self._open.counted == 0.0:
            raise EmptyWindowError(
                f"all {self._open.size} batches of this window have zero units (every label is "
                "-100), so its mean does not exist: filter such samples"
            )
        if self._made_for_optimizer is self.optimizer:
            return
        if self._whole is not None:
            self._whole.detach()
        if self._weighted is not None:
            self._weighted.detach()
        self._whole = self._weighted = None
        if self.audit and self.coupled is None:
            refuse_router_balance(self)
        why = reason_for_trainer_steps(self)
        if why is None:
            self._whole = self._whole_windows(uncompiled(model))
        else:
            self._weighted = WeightedLoss(self, why)
            _log.info("micro-steps run eagerly, by the Trainer itself: %s", why)
        self._made_for_optimizer, self._operations = self.optimizer, {}

    def _whole_windows(self, model: nn.Module) -> GivenWindows:
        size = self.micro_batch
        execute = self.execute
        if execute == "auto" and self.args.torch_compile:
            execute = "graph" if self.args.device.type == "cuda" else "compile"
        options = {"loss": self.coupled} if self.coupled is not None else self._loss_options()
        own = "model's bf16" if self.accelerator.mixed_precision == "bf16" else "full"
        return GivenWindows(
            model,
            getattr(self.optimizer, "optimizer", self.optimizer),
            host=self,
            micro_batch=Samples(None) if size is None else size,  # type: ignore[arg-type]
            precision=own,
            batchnorm=self.batchnorm,
            execute=execute,
            memory=self.memory,
            audit=self.audit,
            close=self.window_close,
            **options,
        )

    def _loss_options(self) -> dict[str, Any]:
        """Return the loss and units functions of the windows."""
        return trainer_loss(self)

    def _run_window(self, whole: GivenWindows, model: nn.Module) -> Sequence[Tensor]:
        """Make the gradient of the open window."""
        model.train()
        optimizer: Any = self.optimizer
        if callable(getattr(optimizer, "train", None)):  # one without a schedule
            optimizer.train()
        batches = [self._prepared(inputs) for inputs in self._open.batches]
        shares = whole.make_gradient(
            batches, updates=self.state.global_step, units=self._open.counted
        )
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            from accelerate.utils.memory import clear_device_cache

            clear_device_cache()
        return shares

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the Trainer's count; it walks over the model, so once for each shape."""
        if not isinstance(inputs, Mapping) or not self._open.size:
            return super().floating_point_ops(inputs)
        shapes = tuple((n, value.shape) for n, value in inputs.items() if isinstance(value, Tensor))
        if shapes not in self._operations:
            operations = super().floating_point_ops(cast("dict[str, Any]", inputs))
            self._operations[shapes] = operations
        return self._operations[shapes]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, without its check of every loss.

        It would wait for the device after each micro-batch. A loss that is not finite raises here.
        """
        raises = self.window_close.nonfinite == "raise" and not self.args.fp16
        changed = {"logging_nan_inf_filter": False} if raises else {}
        with replaced_attributes(self.args, **changed):
            return super().train(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """End the training; graphs leave the device's memory to what follows."""
        self._open = TrainerWindow()
        if self._whole is not None:
            self._whole.release()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[no-untyped-call]


def leave_out_repeated(trainer: Any, batches: list[Any]) -> None:
    """Keep this rank's own samples of the loader's last batch, in place.

    Accelerate repeats samples until all ranks have as many; they would count twice.
    """
    accelerator = trainer.accelerator
    last = samples_of_last_batches(accelerator)
    if last is None:
        return
    (size, total), layout = last, layout_of(batches[-1])
    labels: Any = batches[-1].get("labels") if isinstance(batches[-1], Mapping) else None
    is_its_own = trainer.units_of is None and trainer.coupled is None
    masks = is_its_own and labels is not None and labels.dtype == torch.long
    has_empty = total <= size * (accelerator.num_processes - 1) and len(batches) == 1
    if not trainer.takes_parts or layout.size != size or (has_empty and not masks):
        raise UnsupportedError(
            "the number of samples is not a multiple of ranks × per_device_train_batch_size, so "
            "Accelerate repeats some at the end of an epoch, which cannot be left out here: set "
            "dataloader_drop_last=True"
        )
    if not accelerator.gradient_state.end_of_dataloader:
        return
    kept = min(max(total - accelerator.process_index * size, 0), size)
    if kept:
        batches[-1] = layout.take(slice(kept))
    elif masks:
        batches[-1] = {**batches[-1], "labels": torch.full_like(labels, -100)}
    else:
        batches.pop()


def trainer_loss(trainer: Any) -> dict[str, Any]:
    """Return the loss and units functions of `WholeBatch` for this trainer's loss.

    They are partials of the trainer's own methods, so that what those read is seen: a graph is made
    again when it changes.
    """
    count = trainer.count_units if trainer.units_of is None else trainer.units_of
    parts = {"compute_loss": trainer.compute_loss, "units": count}
    loss = functools.partial(_as_loss, context=trainer.compute_loss_context_manager, **parts)
    loss.__name__ = "the loss"  # type: ignore[attr-defined]
    # The context is the Trainer's own: autocast, and what it puts around every step.
    loss.as_read = trainer.compute_loss_context_manager  # type: ignore[attr-defined]
    loss.reads = functools.partial(_as_loss, context=nullcontext, **parts)  # type: ignore[attr-defined]
    return {"loss": loss, "units": count}


def _as_loss(
    model: nn.Module,
    inputs: Any,
    *,
    compute_loss: Callable[..., Any],
    context: Callable[[], AbstractContextManager[Any]],
    units: UnitsFunction,
) -> Loss:
    counted = check_units(units(inputs))
    # compute_loss may take its labels out of the inputs.
    own = dict(inputs) if type(inputs) is dict else copy.copy(inputs)
    with context():
        mean = compute_loss(model, own, num_items_in_batch=None)
    return mean_loss(mean, counted)


def uncompiled(model: Any) -> Any:
    """Return the module inside what torch.compile made of it."""
    return getattr(model, "_orig_mod", model)


def reason_for_trainer_steps(trainer: Any) -> str | None:
    """Return why the Trainer itself must make the forwards and backwards; None if it need not."""
    if engine_of(trainer.model_wrapped) != "replicated":
        return f"{type(trainer.model_wrapped).__name__} makes its backwards itself"
    if trainer.accelerator.mixed_precision not in ("no", "bf16"):
        return f"{trainer.accelerator.mixed_precision} has a GradScaler of Accelerate's"
    own = [kind for kind in type(trainer).__mro__ if "training_step" in vars(kind)]
    own.remove(ExactTrainerMixin)
    if isinstance(getattr(trainer, "maybe_activation_offload_context", None), nullcontext):
        while own[0].__module__.startswith("trl.") and own[0].__name__ in _STEPS_OF_TRL:
            own = own[1:]
    if own[0].__module__.startswith("transformers."):
        return None
    return f"{own[0].__name__}.training_step is not the Trainer's own"


def refuse_own_batches(trainer: type[Any]) -> None:
    """Refuse a trainer of TRL's that makes its batches, and counts them, itself."""
    kind = next((base for base in trainer.__mro__ if "_prepare_inputs" in vars(base)), None)
    if kind is None or not kind.__module__.startswith("trl."):
        return
    raise UnsupportedError(
        f"exact({kind.__name__}): it generates its batches itself, in _prepare_inputs, and "
        f"wholebatch does not know what its loss is a mean over: use {kind.__name__} as it is "
        "(exact(GRPOTrainer) and exact(RLOOTrainer) are known)"
    )


def refuse_router_balance(trainer: Any) -> None:
    """Refuse a mixture of experts that adds the balance of each batch to its loss."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    config = model.config.get_text_config() if hasattr(model, "config") else None
    is_on = getattr(config, "output_router_logits", False) or getattr(
        trainer, "aux_loss_enabled", False
    )
    names = ("router_aux_loss_coef", "aux_loss_coef")
    weights = [getattr(holder, name, None) for holder in (trainer, model, config) for name in names]
    if is_on and any(weights):
        raise UnsupportedError(
            f"{type(model).__name__} adds the load balance of each batch to its loss "
            f"(router_aux_loss_coef={next(filter(None, weights))}), and the balance of a window is "
            "not their mean: pass exact(Trainer, loss=wb.moe_loss()), which computes it over the "
            "whole window, or set router_aux_loss_coef=0 (audit=False keeps the balance of each "
            "batch)"
        )


def refuse_unsupported(trainer: Any) -> None:
    """Refuse steps within the backward, DataParallel, and ranks that share batches."""
    if "lomo" in str(trainer.args.optim).lower():
        raise UnsupportedError(
            f"optim={trainer.args.optim} updates within every backward, so a window of several "
            "batches makes several updates: use another optimizer"
        )
    if trainer.args.n_gpu > 1:
        raise UnsupportedError(
            f"Trainer on {trainer.args.n_gpu} GPUs in one process (DataParallel), which averages "
            "the losses of its replicas: start one process per GPU (torchrun, accelerate launch)"
        )
    refuse_shared_batches(trainer.accelerator, "Trainer")
