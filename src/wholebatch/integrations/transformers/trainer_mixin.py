"""The mixin that weighs every loss of a Trainer by its share of the window's units.

The Trainer has all batches of a window in hand before its first forward, so the units of the whole
window on all ranks are counted there, and each loss (a mean over its own units) is weighed by its
share of them. That needs nothing of the model: whether it accepts `num_items_in_batch` or not,
whether the loss is its own, a `compute_loss_func` or an overridden `compute_loss`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from wholebatch.core import random_state
from wholebatch.core.close import Policy
from wholebatch.core.loss import Loss, Units, check_units, mean_loss
from wholebatch.core.optional_packages import require
from wholebatch.core.safe_loading import load_tensors
from wholebatch.core.splitting import batch_size_of, split
from wholebatch.errors import EmptyWindowError, StateError
from wholebatch.integrations.host_window import FirstLook, Given, Hosted, Options
from wholebatch.integrations.transformers.label_units import (
    count_labels,
    is_encoder_decoder,
    knows_loss,
    measured_shift,
    shifts_labels,
)
from wholebatch.integrations.transformers.trainer_facts import (
    EpochEnd,
    check,
    hosts_count,
    is_scaled,
    kept_in,
    nothing_through,
    refuse_own_batches,
    stepped_here,
)
from wholebatch.integrations.transformers.trainer_micro_batch import most_that_fit
from wholebatch.memory.budget import Budget

require("transformers", at_least="5.17", extra="transformers", purpose="wholebatch in Transformers")

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:  # a mixin: it stands before the Trainer, or one of its descendants, in the bases
    _Trainer = object

__all__ = ["ExactWindows", "MicroBatch", "UnitsFunction"]

_log = logging.getLogger("wholebatch")

UnitsFunction: TypeAlias = Callable[[Mapping[str, Any]], Units]
MicroBatch: TypeAlias = int | Literal["auto"] | None
_WINDOW_FILE = "wholebatch_window_{rank}.pt"


class ExactWindows(_Trainer):
    """The mixin that `exact` puts before a trainer, for classes that are written out:

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
    _takes_count: bool | None = None  # whether the loss divides by a num_items_in_batch it is given
    _epoch_end: EpochEnd | None = None
    _batches = 0  # of the epoch
    _place = 0  # batches of the window that are done
    _size = 0
    _is_last = False  # whether the next backward is the window's last
    _chosen: int | None = None
    _shift: bool | None = None
    _is_counting = False
    _window: Hosted | None = None
    _look: FirstLook | None = None
    _stepped_by: Any = None  # the optimizer that the window was made for
    _loss_so_far: Tensor | float = 0.0
    _resume: dict[str, Any] | None = None

    # ------------------------------------------------------------------ units

    def count_units(self, inputs: Mapping[str, Any]) -> Units:
        """What the loss of these inputs is a mean over."""
        if self.units_of is not None:
            return check_units(self.units_of(inputs))
        return count_labels(inputs, lambda: self._shifts_labels(inputs))

    def _shifts_labels(self, inputs: Mapping[str, Any]) -> bool:
        """Whether the first label of a sample never counts; looked at once."""
        if self._shift is None:
            known = knows_loss(self) or is_encoder_decoder(self)
            self._shift = shifts_labels(self) if known else measured_shift(self._evaluated, inputs)
        return self._shift

    def _evaluated(self, inputs: dict[str, Any], count: Tensor | None = None) -> Tensor:
        """The loss of these inputs, with nothing left behind."""
        model, before = self.model_wrapped, random_state.capture(every=False)
        training = model.training
        model.eval()
        try:
            with torch.no_grad(), self.compute_loss_context_manager():
                given: dict[str, Any] = {} if count is None else {"num_items_in_batch": count}
                loss: Any = self.compute_loss(model, self._ready(inputs), **given)
            mean: Tensor = loss
            return mean
        finally:
            model.train(training)
            random_state.restore(before)

    @property
    def _prepares(self) -> bool:
        """Whether `_prepare_inputs` is the user's own, which may change what is counted."""
        home: str = getattr(self._prepare_inputs, "__module__", "") or ""
        return not home.startswith("transformers.")

    def _ready(self, inputs: Any) -> Any:
        """Return the inputs as the loss gets them; those of a user's own preparation are that."""
        return inputs if self._prepares else self._prepare_inputs(inputs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The batches of the next window; their units are counted on the way."""
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
        """The Trainer's epoch, with a step at its end also where the loader has no length."""
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
        hosts = None if self.units_of is not None else hosts_count(self, batch_samples)
        counts = torch.stack([counted, counted if hosts is None else hosts.to(device)])
        if self.accelerator.num_processes > 1:
            counts = self.accelerator.gather(counts.reshape(1, 2)).sum(0)
        self._counted, self._divisor = counts.tolist()
        if self._divisor != self._counted and not self._divides_by_count(batch_samples[0]):
            self._divisor = self._counted
        return counts[0]

    def _divides_by_count(self, inputs: Mapping[str, Any]) -> bool:
        """Whether the loss is a sum over the count that the Trainer gives it; looked at once.

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
        """Forward and backward of one batch, in micro-batches where that was asked for."""
        window = self._begin_window(model) if self._place == 0 else self._open_window()
        if self._resume is not None:
            if self._place < self._resume["done"]:
                self._place += 1  # its gradient is in the checkpoint
                return torch.zeros((), device=self.args.device)
            self._continue_window(model)
        micros = self._micros(inputs)
        self._look_first(inputs, len(micros))
        total: Any = None
        for index, micro in enumerate(micros):
            holds = index + 1 < len(micros)
            self._is_last = not holds and self._place + 1 == self._size
            with (
                self.accelerator.no_sync(model) if holds else nullcontext(),
                self._weighing(window),
                window.backward(),
            ):
                loss = super().training_step(model, micro, num_items_in_batch)
            total = loss if total is None else total + loss
        self._place += 1
        self._loss_so_far += total
        if window.is_open and self._place == self._size:
            window.settle(averaged_by=window.ranks.size, announced=self._counted)
        return total

    def _look_first(self, inputs: Any, micros: int) -> None:
        """Before the first window in parts: does the loss of some samples add up?"""
        look, in_parts = self._look, micros > 1 or self._size > 1
        if look is None or not look.pending:
            return
        if not in_parts and self.accelerator.num_processes == 1:
            return

        def run(few: Any) -> Loss:
            trained: Any = self.model
            with self.compute_loss_context_manager():
                mean: Any = self.compute_loss(trained, few)
            return mean_loss(mean, self.count_units(few))

        look.at(run, self._ready(inputs), micro_batch=self._chosen)

    def _begin_window(self, model: nn.Module) -> Hosted:
        check(self)
        if self._counted == 0.0:
            raise EmptyWindowError(
                f"all {self._size} batches of this window have zero units (every label is -100), "
                "so its mean does not exist: filter such samples"
            )
        window = self._open_window()
        if window.is_open:  # the Trainer has begun anew (auto_find_batch_size)
            window.discard()
        return window

    def _open_window(self) -> Hosted:
        """Return the ledger of this optimizer's windows."""
        optimizer: Any = self.optimizer
        if self._window is None or self._stepped_by is not optimizer:
            trained: Any = self.model
            self.model_wrapped.train()
            if self._window is not None:
                self._window.detach()
            self._stepped_by = optimizer
            self._window = Hosted(
                [trained],
                stepped_here(self),
                device=self.args.device,
                options=Options(self.batchnorm, "raise", self.nonfinite, self.audit),
                gradients=kept_in(self.model_wrapped),
                owns_forward=True,
                is_scaled=lambda: is_scaled(self.accelerator),
            )
            off = "exact(..., audit=False)"
            self._look = FirstLook(trained, self._window, host=self, off=off)
        return self._window

    @contextmanager
    def _weighing(self, window: Hosted) -> Iterator[None]:
        """Within it, every loss is weighed by its share of the window's units.

        On the instance, so that a compute_loss that a subclass has overridden is weighed too. The
        Trainer's own division by the number of batches is made one by 1.
        """
        names = ("compute_loss", "_prepare_inputs")
        found = {name: self.__dict__[name] for name in names if name in self.__dict__}
        steps, inner = self.current_gradient_accumulation_steps, self.compute_loss

        @functools.wraps(inner)
        def weighed(
            model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            units = self.count_units(inputs)
            result = inner(model, inputs, return_outputs=return_outputs, num_items_in_batch=None)
            mean: Any = result[0] if return_outputs else result
            given = Given.of(mean=mean, units=units, audit=self.audit)
            # The engine averages over the ranks, and the window's mean is over all of them.
            wide = units.double() if isinstance(units, Tensor) else units
            share = wide / self._divisor * self.accelerator.num_processes
            if self.accelerator.num_processes > 1 and not units:
                trained: Any = self.model
                loss = nothing_through(trained)
            else:
                loss = mean_loss(mean, share).total
            window.enter(given, loss, is_last=self._is_last)
            if self._is_last and kept_in(self.model_wrapped) == "elsewhere":
                window.settle(announced=self._counted)  # its engine steps within the backward
            return (loss, *result[1:]) if return_outputs else loss

        if self._prepares:
            self._prepare_inputs = lambda inputs: inputs  # type: ignore[method-assign]
        self.compute_loss = weighed  # type: ignore[method-assign]
        self.current_gradient_accumulation_steps = 1
        try:
            yield
        finally:
            self.current_gradient_accumulation_steps = steps
            for name in names:
                self.__dict__.pop(name, None)
            self.__dict__.update(found)

    # ---------------------------------------------------------- micro-batches

    def _micros(self, inputs: Any) -> list[Any]:
        if self.micro_batch is None:
            return [inputs]
        inputs = dict(inputs)
        if self._chosen is None:
            asked = self.micro_batch
            self._chosen = most_that_fit(self, inputs, self.memory) if asked == "auto" else asked
        return list(split(inputs, min(self._chosen, batch_size_of(inputs))))

    # ----------------------------------------------------------------- resume

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """The Trainer's checkpoint; in the middle of a window with what the window holds."""
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        file = folder / _WINDOW_FILE.format(rank=self.args.process_index)
        if not 0 < self._place < self._size or self._window is None:
            file.unlink(missing_ok=True)
            return
        trained: Any = self.model_wrapped
        if kept_in(trained) != "whole":
            _log.warning(
                "the gradients of an open window are inside %s: the window begins again after a "
                "resume, with other random numbers",
                type(trained).__name__,
            )
            return
        inner: Any = self.model
        names, parameters = zip(*inner.named_parameters(), strict=True)
        held = zip(names, self._window.sums.held(parameters), strict=True)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(
            {
                "done": self._place,
                "size": self._size,
                "counted": self._counted,
                "loss": torch.as_tensor(self._loss_so_far),
                "gradients": {name: gradient for name, gradient in held if gradient is not None},
                "window": self._window.state_dict(),
                "random": random_state.capture(),
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

    def _continue_window(self, model: nn.Module) -> None:
        """The gradients and random generators as they were when the window was left."""
        saved, self._resume = self._resume, None
        assert saved is not None
        if (saved["size"], saved["counted"]) != (self._size, self._counted):
            raise StateError(
                f"the checkpoint was made in a window of {saved['size']} batches with "
                f"{saved['counted']:g} units, and this one has {self._size} with "
                f"{self._counted:g}: resume with the same data and settings"
            )
        assert self._window is not None
        inner: Any = self.model
        names, parameters = zip(*inner.named_parameters(), strict=True)
        self._window.load_state_dict(saved["window"])
        self._window.sums.put_back(parameters, [saved["gradients"].get(name) for name in names])
        self._loss_so_far = saved["loss"].to(self.args.device)
        self._tr_loss += self._loss_so_far
        random_state.restore(saved["random"])
