"""`exact`: a Trainer that weighs every loss by its share of the window's units.

The Trainer has all batches of a window in hand before its first forward, so the units of the whole
window on all ranks are counted there, and each loss (a mean over its own units) is weighted by its
share of them. That needs nothing of the model: whether it accepts `num_items_in_batch` or not,
whether the loss is its own, a `compute_loss_func` or an overridden `compute_loss`.

A causal language model's loss compares the logits of place t with the label of place t + 1, so the
first label of a sample never counts. Transformers says which of its losses do that. A loss that it
does not know is measured once, before the first step: the mean over two sets of places must be the
mean of their means, weighted by how many labels each has; only the right count makes it so.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from wholebatch.core.close import Policy
from wholebatch.core.forward_state import capture_random, restore_random
from wholebatch.core.loss import Loss, Units, check_units, mean_loss
from wholebatch.core.safe_loading import load_tensors
from wholebatch.core.splitting import batch_size_of, split
from wholebatch.errors import (
    EmptyWindowError,
    LossError,
    NonFiniteError,
    OptionError,
    StateError,
    UnsupportedError,
)
from wholebatch.integrations.host_window import (
    AdapterOptions,
    FirstLook,
    GradientsIn,
    HostLedger,
    HostLoss,
    refuse_shared_batches,
    replaced_attributes,
)
from wholebatch.memory.budget import Budget, parse_memory
from wholebatch.memory.trial_step import choose_on_device

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:  # A mixin stands before the Trainer, or one of its descendants, in the bases.
    _Trainer = object

__all__ = [
    "ExactWindows",
    "count_labels",
    "counted_by_trainer",
    "exact",
    "known_shift",
    "measured_shift",
]


_HELP = "pass exact(Trainer, units=a function of the batch's inputs) that counts it"
_LIBRARIES = ("transformers.", "trl.")
# What rounding leaves of the right count's residual is far below this.
_AGREES = 1e-4


def count_labels(inputs: Mapping[str, Any], shifts: Callable[[], bool]) -> int | Tensor:
    """Return how many labels of these inputs count; `shifts()`: the first of a sample does not."""
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


def known_shift(trainer: Any) -> bool | None:
    """Return True if the loss compares place t with label t + 1, None if that is not known.

    It is known of the losses of Transformers and TRL themselves.
    """
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    model = trainer.accelerator.unwrap_model(trainer.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    home: str = getattr(trainer.compute_loss, "__module__", "") or ""
    if trainer.compute_loss_func is not None or not home.startswith(_LIBRARIES):
        return None
    kind = LOSS_MAPPING.get(getattr(model, "loss_type", None) or "")
    if home.startswith("trl."):
        return True
    return None if kind is None else kind is ForCausalLMLoss


def measured_shift(mean_of: Callable[[dict[str, Any]], Tensor], inputs: Mapping[str, Any]) -> bool:
    """Return True if the loss leaves out the first label, as evaluated on these inputs.

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


def counted_by_trainer(trainer: Any, batches: Iterable[Mapping[str, Any]]) -> Tensor | None:
    """Return what the Trainer itself would divide a window's loss by, on this rank, if at all."""
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


_log = logging.getLogger("wholebatch")

UnitsFunction: TypeAlias = Callable[[Mapping[str, Any]], Units]
MicroBatch: TypeAlias = int | Literal["auto"] | None
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
    micro_batch: MicroBatch = None
    memory: Budget | None = None
    batchnorm: str = "refuse"
    nonfinite: Policy = "raise"
    audit: bool = True

    _counted: float | None = None  # units of the open window, on all ranks
    _divisor = 0.0  # what the Trainer divides the whole batch's sum by; nearly always the units
    _takes_count: bool | None = None  # True if the loss divides by its num_items_in_batch
    _epoch_end: EpochEnd | None = None
    _batches = 0  # of the epoch
    _place = 0  # batches of the window that are done
    _size = 0
    _chosen: int | None = None
    _shift: bool | None = None
    _is_counting = False
    _window: HostLedger | None = None
    _look: FirstLook | None = None
    _stepped_by: Any = None  # the optimizer that the window was made for
    _loss_so_far: Tensor | float = 0.0
    _resume: dict[str, Any] | None = None

    @property
    def _trained(self) -> Any:
        return self.model

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
        model, before = self.model_wrapped, capture_random(every=False)
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

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of the next window; count their units on the way."""
        self._is_counting = True
        try:
            samples, _ = found = super().get_batch_samples(*args, **kwargs)
        finally:
            self._is_counting = False
        self._place, self._size, self._loss_so_far = 0, len(samples), 0.0
        self._batches += self._size
        asked = args[1] if len(args) > 1 else kwargs["num_batches"]
        if self._epoch_end is not None and 0 < self._size < asked:
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
        refuse_own_batches(type(self))
        if self._prepares:  # the whole window, before it is counted: the loss gets the same
            self.model_wrapped.train()
            batch_samples[:] = [self._prepare_inputs(inputs) for inputs in batch_samples]
        units = [torch.as_tensor(self.count_units(inputs)).double() for inputs in batch_samples]
        counted = torch.stack([one.to(device) for one in units]).sum()
        hosts = None if self.units_of is not None else counted_by_trainer(self, batch_samples)
        counts = torch.stack([counted, counted if hosts is None else hosts.to(device)])
        if self.accelerator.num_processes > 1:
            counts = self.accelerator.gather(counts.reshape(1, 2)).sum(0)
        self._counted, self._divisor = counts.tolist()
        if self._divisor != self._counted and not self._divides_by_count(batch_samples[0]):
            self._divisor = self._counted
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
        return self._takes_count

    # ----------------------------------------------------------- the backward

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Run forward and backward of one batch, in micro-batches if `micro_batch` is set."""
        window = self._begin_window() if self._place == 0 else self._open_window()
        if self._resume is not None:
            if self._place < self._resume["done"]:
                self._place += 1  # its gradient is in the checkpoint
                return torch.zeros((), device=self.args.device)
            self._continue_window()
        micros = self._micros(inputs)
        self._look_first(inputs, len(micros))
        total: Any = None
        for index, micro in enumerate(micros):
            holds = index + 1 < len(micros)
            is_last = not holds and self._place + 1 == self._size
            with (
                self.accelerator.no_sync(model) if holds else nullcontext(),
                self._weighing(window, is_last=is_last),
                window.backward(),
            ):
                loss = super().training_step(model, micro, num_items_in_batch)
            total = loss if total is None else total + loss
        self._place += 1
        self._loss_so_far += total
        if window.is_open and self._place == self._size:
            window.settle(averaged_by=window.group.ranks, announced=self._counted)
        return total

    def _look_first(self, inputs: Any, micros: int) -> None:
        """Refuse a loss that does not add up, before the first window in parts."""
        look = self._look
        in_parts = micros > 1 or self._size > 1 or self.accelerator.num_processes > 1
        if look is None or not look.pending or not in_parts:
            return

        def run(few: Any) -> Loss:
            with self.compute_loss_context_manager():
                mean: Any = self.compute_loss(self._trained, few)
            return mean_loss(mean, self.count_units(few))

        look.at(run, self._prepared(inputs), micro_batch=self._chosen)

    def _begin_window(self) -> HostLedger:
        refuse_unsupported(self)
        if self._counted == 0.0:
            raise EmptyWindowError(
                f"all {self._size} batches of this window have zero units (every label is -100), "
                "so its mean does not exist: filter such samples"
            )
        window = self._open_window()
        if window.is_open:  # the Trainer has begun anew (auto_find_batch_size)
            window.discard()
        return window

    def _open_window(self) -> HostLedger:
        """Return the ledger of this optimizer's windows."""
        optimizer: Any = self.optimizer
        if self._window is None or self._stepped_by is not optimizer:
            self.model_wrapped.train()
            if self._window is not None:
                self._window.detach()
            self._stepped_by = optimizer
            self._window = HostLedger(
                [self._trained],
                stepped_here(self),
                device=self.args.device,
                options=AdapterOptions(self.batchnorm, "raise", self.nonfinite, self.audit),
                gradients=engine_keeps(self.model_wrapped),
                owns_forward=True,
                scaled_by=self.accelerator,
            )
            off = "exact(..., audit=False)"
            self._look = FirstLook(self._trained, self._window, host=self, off=off)
        return self._window

    def _weighing(self, window: HostLedger, *, is_last: bool) -> AbstractContextManager[None]:
        """Return a context in which every loss is weighted by its share of the window's units.

        It replaces compute_loss on the instance, so that one that a subclass has overridden is
        weighted too. The Trainer's own division by the number of batches becomes one by 1.
        """
        inner = self.compute_loss

        @functools.wraps(inner)
        def weighed(
            model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            units = self.count_units(inputs)
            result = inner(model, inputs, return_outputs=return_outputs, num_items_in_batch=None)
            mean: Any = result[0] if return_outputs else result
            given = HostLoss.of(mean=mean, units=units, audit=self.audit)
            loss = self._share_of(mean, units)
            window.enter(given, loss, is_last=is_last)
            if is_last and engine_keeps(self.model_wrapped) == "elsewhere":
                window.settle(announced=self._counted)  # its engine steps within the backward
            return (loss, *result[1:]) if return_outputs else loss

        replaced: dict[str, Any] = {"current_gradient_accumulation_steps": 1}
        if self._prepares:
            replaced["_prepare_inputs"] = lambda inputs: inputs
        return replaced_attributes(self, compute_loss=weighed, **replaced)

    def _share_of(self, mean: Tensor, units: Units) -> Tensor:
        """Return what a loss adds to the window's mean; the engine will average over the ranks."""
        ranks = self.accelerator.num_processes
        if ranks > 1 and not units:
            return zero_loss(self._trained)
        exact_units = units.double() if isinstance(units, Tensor) else units
        return mean_loss(mean, exact_units / self._divisor * ranks).total

    # ---------------------------------------------------------- micro-batches

    def _micros(self, inputs: Any) -> list[Any]:
        if self.micro_batch is None:
            return [inputs]
        inputs = dict(inputs)
        if self._chosen is None:
            if self.micro_batch == "auto":
                self._chosen = most_that_fit(self, self._prepared(inputs), self.memory)
            else:
                self._chosen = self.micro_batch
        return list(split(inputs, min(self._chosen, batch_size_of(inputs))))

    # ----------------------------------------------------------------- resume

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save the Trainer's checkpoint, and an open window with its gradients."""
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        file = folder / _WINDOW_FILE.format(rank=self.args.process_index)
        if not 0 < self._place < self._size or self._window is None:
            file.unlink(missing_ok=True)
            return
        trained: Any = self.model_wrapped
        if engine_keeps(trained) != "whole":
            _log.warning(
                "the gradients of an open window are inside %s: the window begins again after a "
                "resume, with other random numbers",
                type(trained).__name__,
            )
            return
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(
            {
                "done": self._place,
                "size": self._size,
                "counted": self._counted,
                "loss": torch.as_tensor(self._loss_so_far),
                "window": self._window.state_dict(list(self._trained.parameters())),
                "random": capture_random(),
            },
            file,
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        file = Path(checkpoint) / _WINDOW_FILE.format(rank=self.args.process_index)
        if file.exists():
            self._resume = load_tensors(file)

    def _continue_window(self) -> None:
        """Restore the gradients and random generators of the window in the checkpoint."""
        saved, self._resume = self._resume, None
        assert saved is not None
        if (saved["size"], saved["counted"]) != (self._size, self._counted):
            raise StateError(
                f"the checkpoint was made in a window of {saved['size']} batches with "
                f"{saved['counted']:g} units, and this one has {self._size} with "
                f"{self._counted:g}: resume with the same data and settings"
            )
        assert self._window is not None
        self._window.load_state_dict(saved["window"], list(self._trained.parameters()))
        self._loss_so_far = saved["loss"].to(self.args.device)
        self._tr_loss += self._loss_so_far
        restore_random(saved["random"])


def exact(
    trainer: type[Any],
    *,
    units: UnitsFunction | None = None,
    micro_batch: MicroBatch = None,
    memory: Budget | None = None,
    batchnorm: str = "refuse",
    nonfinite: Policy = "raise",
    audit: bool = True,
) -> type[Any]:
    """Return the class of trainer whose every update is that of the undivided global batch.

    The trainer's loss stays a mean, which is what Transformers calls the loss. `units(inputs)`
    counts what it is a mean over, on the inputs that the loss is given; the default counts the
    labels that are not -100 (from the second one on, where the model's loss shifts them).
    `micro_batch` cuts every batch of the loader further, into that many samples, or by "auto" into
    the most that are predicted to fit into `memory` ("20GiB", a fraction, or what is free); the
    update stays the same. A loss or gradient that is not finite raises `NonFiniteError` before the
    step; with `nonfinite="skip"` such a window makes no update (the scheduler is stepped all the
    same).
    """
    if not isinstance(trainer, type) or not hasattr(trainer, "training_step"):
        raise OptionError(
            f"exact({trainer!r}): must be transformers.Trainer, or a class that descends from it"
        )
    refuse_own_batches(trainer)
    if units is not None and not callable(units):
        raise OptionError(f"units={units!r}: must be a function of a batch's inputs")
    if micro_batch not in (None, "auto") and (
        isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or micro_batch < 1
    ):
        raise OptionError(
            f'micro_batch={micro_batch!r}: must be a positive number of samples, "auto" or None'
        )
    if memory is not None and micro_batch != "auto":
        raise OptionError(f'memory={memory!r} without micro_batch="auto": it would not be used')
    options = {
        "units_of": None if units is None else staticmethod(units),
        "micro_batch": micro_batch,
        "memory": memory,
        "batchnorm": batchnorm,
        "nonfinite": nonfinite,
        "audit": audit,
    }
    return type(f"Exact{trainer.__name__}", (ExactWindows, trainer), options)


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


def most_that_fit(trainer: Any, inputs: Mapping[str, Any], memory: Budget | None) -> int:
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
    _log.info("%s", choice.summary())
    if not choice.fits:
        raise OptionError(f"not even one sample fits into the memory: {choice.summary()}")
    chosen = torch.tensor([choice.micro_batch], device=device)
    return int(trainer.accelerator.gather(chosen).min())


def _model_loss(model: Any, inputs: Mapping[str, Any]) -> Loss:
    """Return the model's own loss; its units do not matter for the memory of a step."""
    outputs = model(**inputs)
    loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
    return Loss(loss, 1)
