"""`ExactWindows`: a Trainer whose every update is that of the undivided global batch.

The Trainer has all batches of a window in hand before its first forward. So at the window's first
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
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from wholebatch.compile import Execute
from wholebatch.coupled.contrastive.losses import Coupled
from wholebatch.errors import EmptyWindowError, StateError, UnsupportedError
from wholebatch.integrations.host_window import refuse_shared_batches
from wholebatch.integrations.transformers.given_windows import GivenWindows
from wholebatch.integrations.transformers.host_steps import (
    HostSteps,
    TrainerWindow,
    engine_keeps,
    stepped_here,
)
from wholebatch.integrations.transformers.label_units import (
    count_labels,
    counted_by_trainer,
    known_shift,
    measured_shift,
)
from wholebatch.integrations.transformers.router_balance import balanced, refuse_balance
from wholebatch.losses.loss import Loss, Units, check_units, mean_loss
from wholebatch.memory.budget import Budget
from wholebatch.options import BatchNorm, Close, Memory, Samples
from wholebatch.safe_loading import load_tensors
from wholebatch.whole_batch import MicroBatch
from wholebatch.window.close import Policy
from wholebatch.window.forward_state import capture_random, restore_random

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:  # A mixin stands before the Trainer, or one of its descendants, in the bases.
    _Trainer = object


_log = logging.getLogger("wholebatch")

UnitsFunction: TypeAlias = Callable[[Mapping[str, Any]], Units]
# Their training_step offloads activations, and draws completions that `prepare_window` has drawn.
_STEPS_OF_TRL = {"SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", "GKDTrainer"}
_WINDOW_FILE = "wholebatch_window_{rank}.pt"


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


class ExactWindows(_Trainer):
    """The mixin that `exact` puts before a trainer; for a class that is written out:

    ```python
    class MyTrainer(ExactWindows, Trainer):
        units_of = staticmethod(lambda inputs: inputs["weights"].sum())
    ```
    """

    units_of: UnitsFunction | None = None
    coupled: Coupled | None = None
    execute: Execute = "auto"
    window_precision: Literal["fp8"] | None = None
    micro_batch: MicroBatch | Samples | None = None
    memory: Memory | Budget | None = None
    batchnorm: BatchNorm | str = "exact"
    nonfinite: Policy = "raise"
    audit: bool = True
    held: Mapping[str, Any] = MappingProxyType({})
    """Attributes that the trainer has while it makes a step of a window that is prepared."""

    _takes_count: bool | None = None  # True if the loss divides by its num_items_in_batch
    _epoch_end: EpochEnd | None = None
    _batches = 0  # of the epoch
    _shift: bool | None = None
    _is_counting = False
    _open = TrainerWindow()
    _whole: GivenWindows | None = None
    _host: HostSteps | None = None
    _stepped_by: Any = None  # the optimizer that the windows were made for
    _shares: Tensor | None = None  # of each batch in the window's mean
    _resume: dict[str, Any] | None = None

    # ------------------------------------------------------------------ units

    def count_units(self, inputs: Mapping[str, Any]) -> Units:
        """Return how many units the loss of these inputs is a mean over."""
        if self.units_of is not None:
            return check_units(self.units_of(inputs))
        return count_labels(inputs, lambda: self._shifts_labels(inputs))

    def _shifts_labels(self, inputs: Mapping[str, Any]) -> bool:
        """Return True if the first label of a sample never counts; it is found out once."""
        if self._shift is None:
            known = known_shift(self)
            self._shift = measured_shift(self._evaluated, inputs) if known is None else known
        return self._shift

    def _evaluated(self, inputs: dict[str, Any], count: Tensor | None = None) -> Tensor:
        """Return the loss of these inputs in evaluation mode, with nothing left behind."""
        model, before = uncompiled(self.model_wrapped), capture_random(every=False)
        training = model.training
        model.eval()
        try:
            with torch.no_grad(), self.compute_loss_context_manager():
                given: dict[str, Any] = {} if count is None else {"num_items_in_batch": count}
                mean: Any = self.compute_loss(model, self._prepared(inputs), **given)
            return cast("Tensor", mean)
        finally:
            model.train(training)
            restore_random(before)

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
            samples, _ = found = super().get_batch_samples(*args, **kwargs)
        finally:
            self._is_counting = False
        self._open.batches, self._open.size = samples, len(samples)
        self._batches += len(samples)
        asked = args[1] if len(args) > 1 else kwargs["num_batches"]
        if self._epoch_end is not None and 0 < len(samples) < asked:
            self._epoch_end.found = self._batches
        return found

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run the Trainer's epoch, with a step at its end also where the loader has no length."""
        self._epoch_end = kwargs["steps_in_epoch"] = EpochEnd(kwargs["steps_in_epoch"])
        resumed = kwargs["resume_from_checkpoint"] is not None and not self.args.ignore_data_skip
        first = kwargs["epoch"] == kwargs["epochs_trained"]
        self._batches = kwargs["steps_trained_in_current_epoch"] if resumed and first else 0
        super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if not self._is_counting:
            return super()._get_num_items_in_batch(batch_samples, device)
        if not batch_samples:
            return None
        self.prepare_window(batch_samples)
        if self.coupled is not None:  # its loss brings its units
            return None
        units = [torch.as_tensor(self.count_units(inputs)).double() for inputs in batch_samples]
        counted = torch.stack([one.to(device) for one in units]).sum()
        same = self._shift is not None and self._shift == getattr(self, "_loss_shifts_labels", None)
        hosts = None
        if self.units_of is None and not same:
            hosts = counted_by_trainer(self, batch_samples)
        counts = torch.stack([counted, counted if hosts is None else hosts.to(device)])
        if self.accelerator.num_processes > 1:
            counts = self.accelerator.gather(counts.reshape(1, 2)).sum(0)
        window = self._open
        window.counted, window.divisor = counts.tolist()
        if window.divisor != window.counted and not self._divides_by_count(batch_samples[0]):
            window.divisor = window.counted
        return counts[0]

    def _divides_by_count(self, inputs: Mapping[str, Any]) -> bool:
        """Return True if the loss is divided by the count that the Trainer gives it.

        It matters only where the Trainer counts labels that are not in the loss (it does for GPT-2,
        whose loss shifts its labels): its whole batch is then not the model's own mean, and the
        window's must not be either.
        """
        if self._takes_count is None:
            ranks = self.accelerator.num_processes
            units = torch.as_tensor(self.count_units(inputs)).to(self.args.device)
            mean = self._evaluated(dict(inputs))
            shrunk = self._evaluated(dict(inputs), count=8 * ranks * units)
            found = (shrunk.abs() < mean.abs() / 4).double().reshape(1)
            self._takes_count = bool(self.accelerator.gather(found).max())
            self._stepped_by = None  # windows made before count otherwise
        return self._takes_count

    # ------------------------------------------------------------- the window

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Return this batch's share of the window's mean; the first call makes the gradient."""
        window = self._open
        if window.place == 0:
            self._make_windows(model)
        if self._whole is None:
            step = functools.partial(super().training_step, num_items_in_batch=num_items_in_batch)
            share = self._host_step(model, inputs, step)
        else:
            if window.place == 0:
                self._shares = self._run_window(self._whole, model)
            elif window.is_last:
                self._whole.check_untouched()
            assert self._shares is not None
            share = self._shares[window.place]
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
        if self._stepped_by is self.optimizer:
            return
        if self._whole is not None:
            self._whole.detach()
        if self._host is not None:
            self._host.windows.detach()
        self._whole = self._host = None
        why = why_by_host(self)
        if why is not None and self.window_precision is not None:
            raise UnsupportedError(
                f"exact(..., precision={self.window_precision!r}): the Trainer runs its own eager "
                f"steps here ({why}); leave precision= out"
            )
        if why is None:
            self._whole = self._whole_windows(uncompiled(model))
        else:
            if self.audit and self.coupled is None:
                refuse_balance(self, why)
            self._host = HostSteps(self, why)
            _log.info("micro-steps run eagerly, by the Trainer itself: %s", why)
        self._stepped_by = self.optimizer

    def _whole_windows(self, model: nn.Module) -> GivenWindows:
        given = self.micro_batch
        execute = self.execute
        if execute == "auto" and self.args.torch_compile:
            execute = "graph" if self.args.device.type == "cuda" else "compile"
        options: dict[str, Any] = {"loss": self.coupled}
        if self.coupled is None:
            options = trainer_loss(self)
            with_balance = balanced(self, options["loss"])
            if with_balance is not None:
                options, execute = {"loss": with_balance}, self.execute
        own = "model's bf16" if self.accelerator.mixed_precision == "bf16" else "full"
        return GivenWindows(
            model,
            stepped_here(self)[0],
            host=self,
            micro_batch=Samples(None) if given is None else given,  # type: ignore[arg-type]
            precision=self.window_precision or own,
            batchnorm=self.batchnorm,
            execute=execute,
            memory=self.memory,
            audit=self.audit,
            close=Close(nonfinite=self.nonfinite),
            **options,
        )

    def _run_window(self, whole: GivenWindows, model: nn.Module) -> Tensor:
        """Make the gradient of the open window, or take it from the checkpoint."""
        model.train()
        optimizer: Any = self.optimizer
        if callable(getattr(optimizer, "train", None)):  # one without a schedule
            optimizer.train()
        saved, self._resume = self._resume, None
        if saved is not None:
            self._check_saved(saved, "gradients")
            whole.load_gradient(saved["gradients"])
            restore_random(saved["random"])
            return cast("Tensor", saved["shares"].to(self.args.device))
        batches = [self._prepared(inputs) for inputs in self._open.batches]
        units = None if self.coupled is not None else self._open.divisor
        shares = whole.make_gradient(batches, updates=self.state.global_step, units=units)
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            from accelerate.utils.memory import clear_device_cache

            clear_device_cache()
        return shares

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the Trainer's count; it walks over the model, so once a window for each shape."""
        if not isinstance(inputs, Mapping) or not self._open.size:
            return super().floating_point_ops(inputs)
        shapes = tuple((n, value.shape) for n, value in inputs.items() if isinstance(value, Tensor))
        found = self._open.operations
        if shapes not in found:
            found[shapes] = super().floating_point_ops(cast("dict[str, Any]", inputs))
        return cast("int", found[shapes])

    def _host_step(self, model: nn.Module, inputs: Any, step: Callable[..., Tensor]) -> Tensor:
        """Make one batch's forward and backward by the Trainer's own step."""
        assert self._host is not None
        window, saved = self._open, self._resume
        if window.place == 0:
            self._shares = None
        if saved is not None:
            self._check_saved(saved, "window")
            if window.place < saved["done"]:  # its gradient is in the checkpoint
                return torch.zeros((), device=self.args.device)
            self._resume = None
            self._host.windows.load_state_dict(saved["window"])
            self._shares = saved["shares"].to(self.args.device)
            self._tr_loss += self._shares
            restore_random(saved["random"])
        share = self._host.step(model, inputs, window, step)
        self._shares = share.detach() if self._shares is None else self._shares + share.detach()
        return share

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """End the training; graphs leave the device's memory to what follows."""
        self._open = TrainerWindow()
        if self._whole is not None:
            self._whole.release()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[no-untyped-call]

    # ----------------------------------------------------------------- resume

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save the Trainer's checkpoint, and an open window with its gradients."""
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        file = folder / _WINDOW_FILE.format(rank=self.args.process_index)
        window = self._open
        if not 0 < window.place < window.size:
            file.unlink(missing_ok=True)
            return
        saved: dict[str, Any] = {"size": window.size, "counted": window.counted}
        if self._whole is not None:
            saved["gradients"] = self._whole.saved_gradient()
        elif self._host is not None and self._host.kept == "whole":
            saved["done"] = window.place
            saved["window"] = self._host.windows.state_dict()
        else:
            _log.warning(
                "the gradients of an open window are inside %s: the window begins again after a "
                "resume, with other random numbers",
                type(self.model_wrapped).__name__,
            )
            return
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(saved | {"shares": self._shares, "random": capture_random()}, file)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        file = Path(checkpoint) / _WINDOW_FILE.format(rank=self.args.process_index)
        if file.exists():
            self._resume = load_tensors(file)

    def _check_saved(self, saved: Mapping[str, Any], kind: str) -> None:
        window = self._open
        if kind not in saved or (saved["size"], saved["counted"]) != (window.size, window.counted):
            raise StateError(
                f"the checkpoint was made in a window of {saved['size']} batches with "
                f"{saved['counted']} units, and this one has {window.size} with "
                f"{window.counted}: resume with the same data and settings"
            )


def trainer_loss(trainer: Any) -> dict[str, Any]:
    """Return the loss and units functions of `WholeBatch` for this trainer's loss.

    They are partials of the trainer's own methods, so that what those read is seen: a graph is made
    again when it changes.
    """
    count = trainer.count_units if trainer.units_of is None else trainer.units_of
    over = None
    if trainer._takes_count:
        over = functools.partial(_counted_by, trainer)
    loss = functools.partial(
        _as_loss,
        compute_loss=trainer.compute_loss,
        context=trainer.compute_loss_context_manager,
        units=count,
        over=over,
    )
    loss.__name__ = "the loss"  # type: ignore[attr-defined]
    return {"loss": loss, "units": over or count}


def _as_loss(
    model: nn.Module,
    inputs: Any,
    *,
    compute_loss: Callable[..., Any],
    context: Callable[[], AbstractContextManager[Any]],
    units: UnitsFunction,
    over: UnitsFunction | None,
    change: Callable[[Tensor], Tensor] | None = None,
) -> Loss:
    counted = check_units(units(inputs))
    with context():  # compute_loss may take its labels out of the inputs
        mean = compute_loss(model, copy.copy(inputs), num_items_in_batch=None)
    if change is not None:
        mean = change(mean)
    loss = mean_loss(mean, counted)
    return loss if over is None else Loss(loss.total, over(inputs))


def _counted_by(trainer: Any, inputs: Mapping[str, Any]) -> Tensor:
    counted = counted_by_trainer(trainer, [inputs])
    assert counted is not None
    return counted


def uncompiled(model: Any) -> Any:
    """Return the module inside what torch.compile made of it."""
    return getattr(model, "_orig_mod", model)


def why_by_host(trainer: Any) -> str | None:
    """Return why the Trainer itself must make the forwards and backwards; None if it need not."""
    kept = engine_keeps(trainer.model_wrapped)
    if kept != "whole":
        return f"{type(trainer.model_wrapped).__name__} makes its backwards itself"
    if trainer.accelerator.mixed_precision not in ("no", "bf16"):
        return f"{trainer.accelerator.mixed_precision} has a GradScaler of Accelerate's"
    if "lomo" in str(trainer.args.optim).lower():
        return f"optim={trainer.args.optim} steps within the backward"
    own = [kind for kind in type(trainer).__mro__ if "training_step" in vars(kind)]
    own.remove(ExactWindows)
    if isinstance(getattr(trainer, "maybe_activation_offload_context", None), nullcontext):
        while own[0].__module__.startswith("trl.") and own[0].__name__ in _STEPS_OF_TRL:
            own = own[1:]
    if own[0].__module__.startswith("transformers."):
        return None
    return f"{own[0].__name__}.training_step is not the Trainer's own"


def refuse_own_batches(trainer: type[Any]) -> None:
    """Refuse a trainer of TRL's that makes its batches, and counts them, itself."""
    kind = next((one for one in trainer.__mro__ if "_prepare_inputs" in vars(one)), None)
    if kind is None or not kind.__module__.startswith("trl."):
        return
    raise UnsupportedError(
        f"exact({kind.__name__}): it generates its batches itself, in _prepare_inputs, and what "
        f"its loss is a mean over is not known here: use {kind.__name__} as it is "
        "(exact(GRPOTrainer) and exact(RLOOTrainer) are known)"
    )


def refuse_unsupported(trainer: Any) -> None:
    """Refuse DataParallel, and ranks that share batches."""
    if trainer.args.n_gpu > 1:
        raise UnsupportedError(
            f"Trainer on {trainer.args.n_gpu} GPUs in one process (DataParallel), which averages "
            "the losses of its replicas: start one process per GPU (torchrun, accelerate launch)"
        )
    refuse_shared_batches(trainer.accelerator, "Trainer")
