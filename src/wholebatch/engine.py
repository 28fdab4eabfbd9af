"""WholeBatch: give it the whole batch, get the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from wholebatch import precision as precisions
from wholebatch import randomness, state
from wholebatch.close import ClipNorm, CloseOptions, Policy, read_scalars
from wholebatch.coupled import batchnorms, tracked_instance_norms
from wholebatch.coupled import choose as choose_batchnorm
from wholebatch.coupled.audit import uses_batch_statistics
from wholebatch.errors import LossError, NonFiniteError, OptionError, StateError, WindowError
from wholebatch.loss import Loss, Terms, Units, as_loss, check_units
from wholebatch.runners.lockstep import LockStep
from wholebatch.runners.sequential import run_sequential
from wholebatch.snapshot import Snapshot
from wholebatch.splitting import Tokens, batch_size_of, split, to_device
from wholebatch.step import Step
from wholebatch.sync import choose as choose_sync
from wholebatch.target import Ema, Scheduler, build_target
from wholebatch.window import SINGLE, Window

__all__ = ["WholeBatch"]

LossFunction: TypeAlias = Callable[[Any, Any], Loss | Terms | Tensor]
UnitsFunction: TypeAlias = Callable[[Any], Units | Mapping[str, Units]]
MicroBatch: TypeAlias = int | Tokens | Literal["auto"]
AfterMicro: TypeAlias = Callable[[int, int], None]


class WholeBatch:
    """The update of the whole batch, in the memory of a micro-batch.

    >>> import torch, wholebatch as wb
    >>> model = torch.nn.Linear(3, 2)
    >>> def loss(model, micro):
    ...     return wb.cross_entropy(model(micro["x"]), micro["y"])
    >>> train = wb.WholeBatch(
    ...     model, torch.optim.AdamW(model.parameters()), loss=loss, micro_batch=4, clip_norm=1.0
    ... )
    >>> step = train.step({"x": torch.randn(10, 3), "y": torch.randint(0, 2, (10,))})
    >>> step.update, step.units, step.micro_batches
    (1, 10.0, 3)

    `loss(model, micro)` returns `wb.Loss(total, units)`, `wb.Loss.terms({...})` or a tensor of
    per-unit losses. `units(micro)`, if given, counts them before the first backward (a number, or
    one for each term); a loss of several terms needs it. Batches may stay on the host: only the
    micro-batch travels to the model's device. A model with BatchNorm runs its micro-batches in
    lock-step, with the statistics of the whole batch (`batchnorm="exact"`).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        loss: LossFunction,
        micro_batch: MicroBatch = "auto",
        units: UnitsFunction | None = None,
        precision: str = "full",
        clip_norm: ClipNorm = None,
        clip_value: float | None = None,
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        ema: Ema | None = None,
        nonfinite: Policy = "raise",
        zero_units: Policy = "raise",
        batchnorm: str = "exact",
        static: Sequence[str] = (),
        allow_untested_device: bool = False,
    ) -> None:
        for name, function in (("loss", loss), ("units", units)):
            if function is not None and not callable(function):
                raise OptionError(f"{name}={function!r}: must be a function")
        _check_micro_batch(micro_batch)
        options = CloseOptions(clip_norm, clip_value, nonfinite, zero_units)
        sync = choose_sync(model)
        target = build_target(
            model,
            optimizer,
            options=options,
            scheduler=scheduler,
            ema=ema,
            precision=precision,
            scaler=scaler,
            allow_untested_device=allow_untested_device,
        )
        self.model = model
        self.micro_batch = micro_batch
        self.last_step: Step | None = None
        self._loss = loss
        self._units = units
        self._static = tuple(static)
        self._device = target.device
        self._precision = precisions.choose(precision, target.device.type)
        self._window = Window(target, options, sync)
        self._norms = [*batchnorms(model), *tracked_instance_norms(model)]
        self._lock_step = LockStep(self._norms)
        self._batchnorm = None if batchnorm == "exact" else choose_batchnorm(batchnorm, model)
        self._fits: int | None = None  # the size that "auto" has come down to
        self._done = 0  # micro-batches of the open window that are in it
        self._of = 0

    @property
    def updates(self) -> int:
        """Updates made so far."""
        return self._window.updates

    @property
    def skipped(self) -> int:
        """Windows that made no update (not finite, or without units)."""
        return self._window.skipped

    def step(self, batch: Any, *, after_micro: AfterMicro | None = None) -> Step:
        """One update from the whole batch. After an error nothing of the batch is left behind.

        `after_micro(done, of)` is called after every micro-batch; `state_dict()` may be called in
        it, and the step with the same batch after `load_state_dict()` goes on from there.
        """
        if self.micro_batch == "auto" and not self._window.is_open:
            self.last_step = self._step_that_fits(batch, after_micro)
        else:
            self.last_step = self._window_of(self._split(batch, self.micro_batch), after_micro)
        return self.last_step

    def _step_that_fits(self, batch: Any, after_micro: AfterMicro | None) -> Step:
        """Halve on a real out-of-memory, and begin the window again as if nothing had been."""
        samples = batch_size_of(batch, static=self._static)
        size = min(samples, self._fits or samples)
        before = Snapshot(self.model)
        while True:
            try:
                return self._window_of(self._split(batch, size), after_micro)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise  # not even one sample fits
            before.restore()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            size = self._fits = math.ceil(size / 2)

    def _split(self, batch: Any, micro_batch: MicroBatch) -> list[Any]:
        if micro_batch == "auto":  # a saved window goes on with the size that it was split by
            micro_batch = self._fits or batch_size_of(batch, static=self._static)
        return split(batch, micro_batch, static=self._static)

    def _window_of(self, micros: list[Any], after_micro: AfterMicro | None) -> Step:
        window = self._window
        start = randomness.capture(every=False)
        self._precision.begin()
        try:
            if window.is_open:
                first = self._resume_at(micros)
            else:
                first = self._done = 0
                if self._units is not None:
                    window.begin(known=self._count(micros))
                if self._batchnorm is not None:
                    self._batchnorm.begin_window()
            self._of = len(micros)
            told = self._told(after_micro)
            in_lock_step = self._batchnorm is None and len(micros) > 1 and self._is_coupled()
            if not in_lock_step:
                run_sequential(window, micros, self._micro_step, first=first, after_micro=told)
            elif first < len(micros):
                self._run_in_lock_step(micros, told)
            self._precision.end()
            return self._close(micros, None if in_lock_step or first else start)
        finally:
            self._precision.end()
            window.sync.restore()
            self._done = 0
            if window.is_open:
                window.discard()
            if self._batchnorm is not None:
                self._batchnorm.discard_window()

    def _is_coupled(self) -> bool:
        """Whether a BatchNorm would use batch statistics, or an InstanceNorm move its own, now."""
        return any(uses_batch_statistics(module) for _, module in self._norms)

    def _run_in_lock_step(self, micros: list[Any], told: AfterMicro) -> None:
        """All micro-batches together, meeting at every BatchNorm; done all at once."""

        def backward(loss: Loss | Terms) -> None:
            self._window.add_loss(loss)
            self._window.micro_batch_done()

        self._lock_step.run(micros, forward=self._forward, backward=backward)
        told(len(micros), len(micros))

    def _told(self, after_micro: AfterMicro | None) -> AfterMicro:
        def told(done: int, of: int) -> None:
            self._done = done
            if after_micro is not None:
                after_micro(done, of)

        return told

    def _forward(self, micro: Any) -> Loss | Terms:
        micro = to_device(micro, self._device)
        with self._precision.forward():
            loss = as_loss(self._loss(self.model, micro))
        if self._batchnorm is not None:
            self._batchnorm.micro()
        return loss

    def _micro_step(self, micro: Any) -> None:
        self._window.add_loss(self._forward(micro))

    def _count(self, micros: Sequence[Any]) -> dict[str, float]:
        """All units, by term, over the window and the ranks, before the first backward."""
        assert self._units is not None
        counts: dict[str, list[Units]] = {}
        for micro in micros:
            counted = self._units(micro)
            by_name = counted if isinstance(counted, Mapping) else {SINGLE: counted}
            if counts and by_name.keys() != counts.keys():
                raise LossError(
                    f"units= counted the terms {sorted(by_name)} in one micro-batch and "
                    f"{sorted(counts)} in another: return all terms for each, 0 where none"
                )
            for name, count in by_name.items():
                counts.setdefault(name, []).append(check_units(count))
        sums = self._window.sync.sum([math.fsum(read_scalars(c)) for c in counts.values()])
        return dict(zip(counts, sums, strict=True))

    def _close(self, micros: Sequence[Any], start: dict[str, Any] | None) -> Step:
        try:
            step = self._window.close()
            if self._batchnorm is not None:
                self._batchnorm.end_window()
            return step
        except NonFiniteError as error:
            if error.micro_batch is not None or start is None:
                raise
            index, where = self._find_nonfinite(micros, start)
            raise NonFiniteError(f"{error}. {where}", micro_batch=index) from None

    def _find_nonfinite(
        self, micros: Sequence[Any], start: dict[str, Any]
    ) -> tuple[int | None, str]:
        """Each micro-batch alone, with the randomness it had, until a gradient is not finite."""
        now = Snapshot(self.model)
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        parameters = [parameter for _, parameter in named]
        randomness.restore(start)
        try:
            for index, micro in enumerate(micros):
                loss = self._forward(micro)
                terms = [loss] if isinstance(loss, Loss) else list(loss.by_name.values())
                gradients = torch.autograd.grad(
                    [term.total for term in terms], parameters, allow_unused=True
                )
                for (name, _), gradient in zip(named, gradients, strict=True):
                    if gradient is not None and not bool(torch.isfinite(gradient).all()):
                        return index, (
                            f"Replayed, micro-batch {index + 1} of {len(micros)} is the first "
                            f"whose gradient is not finite, at parameter {name}"
                        )
        finally:
            now.restore()
        return None, "Replayed, no micro-batch has such a gradient alone: their sum overflows"

    # ----------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Everything to resume from, in the middle of a window too (not model and optimizer)."""
        saved = state.progress("WholeBatch", self._window)
        saved.update(
            fits=self._fits,
            done=self._done,
            of=self._of,
            batchnorm=None if self._batchnorm is None else self._batchnorm.state_dict(),
        )
        return saved

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; call it after the model and optimizer are loaded."""
        if self._done:
            raise WindowError("load_state_dict() inside step()")
        state.load_progress("WholeBatch", self._window, saved)
        self._fits = saved["fits"]
        self._done = saved["done"] if self._window.is_open else 0
        self._of = saved["of"]
        if self._batchnorm is not None and saved["batchnorm"] is not None:
            self._batchnorm.load_state_dict(saved["batchnorm"])

    def _resume_at(self, micros: Sequence[Any]) -> int:
        if len(micros) != self._of:
            raise StateError(
                f"the saved window had {self._of} micro-batches, this batch makes {len(micros)}: "
                "resume with the same batch and the same micro_batch="
            )
        return self._done


def _check_micro_batch(micro_batch: object) -> None:
    if micro_batch == "auto" or isinstance(micro_batch, Tokens):
        return
    if isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or micro_batch < 1:
        raise OptionError(
            f'micro_batch={micro_batch!r}: must be a positive number of samples, "auto", or '
            "wb.tokens(4096)"
        )
