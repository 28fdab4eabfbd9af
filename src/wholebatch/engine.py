"""WholeBatch: give it the whole batch, get the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from wholebatch import precision as precisions
from wholebatch import randomness, state
from wholebatch.close import ClipNorm, CloseOptions, Policy
from wholebatch.coupled import batchnorms, tracked_instance_norms
from wholebatch.coupled import choose as choose_batchnorm
from wholebatch.coupled.audit import uses_batch_statistics
from wholebatch.coupled.statistics import Statistics
from wholebatch.errors import (
    NonFiniteError,
    OptionError,
    RankError,
    StateError,
    UnsupportedError,
    WindowError,
)
from wholebatch.execute import Execute, Executor, check_execute
from wholebatch.loss import Loss, Terms, as_loss
from wholebatch.runners.lockstep import LockStep
from wholebatch.runners.replay import find_nonfinite
from wholebatch.runners.sequential import run_sequential
from wholebatch.snapshot import Snapshot
from wholebatch.splitting import Tokens, batch_size_of, split, to_device
from wholebatch.splitting.budget import check_micro_batch
from wholebatch.step import Step
from wholebatch.sync import choose as choose_sync
from wholebatch.target import Ema, Scheduler, build_target
from wholebatch.units import SINGLE, UnitsFunction, count_units
from wholebatch.window import Window

__all__ = ["WholeBatch"]

LossFunction: TypeAlias = Callable[[Any, Any], Loss | Terms | Tensor]
MicroBatch: TypeAlias = int | Tokens | Literal["auto"]
AfterMicro: TypeAlias = Callable[[int, int], None]

_NOTHING = object()


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
    micro-batch travels to the model's device. `batch_size` (a number, or a function of the batch)
    and `static` (names of leaves that are not to be split) say how a batch is to be read where it
    cannot be told. A model with BatchNorm runs its micro-batches in
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
        execute: Execute = "auto",
        sync: str = "auto",
        batch_size: int | Callable[[Any], int] | None = None,
        static: str | Sequence[str] = (),
        allow_untested_device: bool = False,
    ) -> None:
        for name, function in (("loss", loss), ("units", units)):
            if function is not None and not callable(function):
                raise OptionError(f"{name}={function!r}: must be a function")
        check_micro_batch(micro_batch)
        options = CloseOptions(clip_norm, clip_value, nonfinite, zero_units)
        engine = choose_sync(model, sync=sync)
        target = build_target(
            model,
            optimizer,
            options=options,
            scheduler=scheduler,
            ema=ema,
            precision=precision,
            scaler=scaler,
            allow_untested_device=allow_untested_device,
            sync=engine,
        )
        self.model = model
        self.micro_batch = micro_batch
        self.last_step: Step | None = None
        self._loss = loss
        self._units = units
        self._layout: dict[str, Any] = {"batch_size": batch_size, "static": static}
        self._device = target.device
        self._precision = precisions.choose(precision, target.device.type)
        self._window = Window(target, options, engine)
        self._norms = [*batchnorms(model), *tracked_instance_norms(model)]
        self._lock_step = LockStep(
            self._norms, reduce=engine.sum_tensor if engine.ranks > 1 else None
        )
        self._batchnorm = None if batchnorm == "exact" else choose_batchnorm(batchnorm, model)
        self._counted: list[str] = [SINGLE]
        self._executor = Executor(
            check_execute(execute, target.device),
            model=model,
            loss=loss,
            window=self._window,
            precision=self._precision,
            device=target.device,
            eager=self._eager,
            single=SINGLE,
            keeps_moments=isinstance(self._batchnorm, Statistics),
        )
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
        samples = batch_size_of(batch, **self._layout)
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
            micro_batch = self._fits or batch_size_of(batch, **self._layout)
        return split(batch, micro_batch, **self._layout)

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
            many = len(micros) > 1 or window.sync.ranks > 1
            in_lock_step = self._batchnorm is None and many and self._is_coupled()
            if not in_lock_step:
                run_sequential(
                    window,
                    micros,
                    self._micro_step,
                    first=first,
                    places=self._agreed_places(len(micros)),
                    after_micro=told,
                )
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

        if self._window.sync.counts_must_agree:
            raise UnsupportedError(
                'batchnorm="exact" on a sharded model: its forwards run collectives of their own, '
                "which cannot wait for each other in lock-step; use DDP, or another batchnorm="
            )
        self._lock_step.run(micros, forward=self._forward, backward=backward)
        told(len(micros), len(micros))

    def _agreed_places(self, own: int) -> int:
        sync = self._window.sync
        if not sync.counts_must_agree:
            return own
        return int(sync.largest(torch.tensor(float(own), device=self._device)))

    # --------------------------------------------------------------- the loop

    def over(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's batches, for `step`; ranks may have different numbers of them.

        A rank that has run out takes part in the updates of the others, with nothing to add.
        """
        window = self._window
        if window.sync.ranks == 1:
            yield from loader
            return
        iterator = iter(loader)
        batch = next(iterator, _NOTHING)
        window.ranks_with_more = int(window.sync.sum([float(batch is not _NOTHING)])[0])
        last = batch
        while batch is not _NOTHING:
            following = next(iterator, _NOTHING)
            window.has_more = following is not _NOTHING
            self._all_have_data()
            yield batch
            last, batch = batch, following
        while window.ranks_with_more:
            self._all_have_data()
            self.join(last)

    def _all_have_data(self) -> None:
        window = self._window
        enough = window.ranks_with_more == window.sync.ranks
        if self._batchnorm is None and not enough and self._is_coupled():
            raise RankError(
                f"only {window.ranks_with_more} of {window.sync.ranks} ranks have data left, "
                'and batchnorm="exact" needs all of them at every BatchNorm: give every rank '
                "equally many batches"
            )

    def join(self, like: Any) -> Step:
        """Take part in the other ranks' step without data; `like`, a batch, is not counted."""
        self._window.has_more = False
        self.last_step = self._join(like)
        return self.last_step

    def _join(self, last: Any) -> Step:
        window = self._window
        if self._batchnorm is None and self._is_coupled():
            raise WindowError(
                f"rank {window.sync.rank} has no sample of this batch, and "
                'batchnorm="exact" needs every rank at every BatchNorm: make the batch larger'
            )
        if self._units is not None and last is not _NOTHING:
            self._counted = sorted(count_units(self._units, [last]))
        known = None if self._units is None else self._count([])
        if not window.sync.counts_must_agree:
            return window.join(known)
        if last is _NOTHING:
            raise RankError(
                f"rank {window.sync.rank} has no data at all, and a sharded model needs every rank "
                "in every forward: give it at least one batch"
            )
        stand_in = self._split(last, self.micro_batch)[:1]
        window.begin(0, known=known)
        self._precision.begin()
        try:
            places = self._agreed_places(0)
            for index in range(places):
                window.closing = index == places - 1
                window.weightless = True
                before = Snapshot(self.model)
                self._micro_step(stand_in[0])
                before.restore()
            self._precision.end()
            return window.close()
        finally:
            self._precision.end()
            window.sync.restore()

    def _told(self, after_micro: AfterMicro | None) -> AfterMicro:
        def told(done: int, of: int) -> None:
            self._done = done
            if after_micro is not None:
                after_micro(done, of)

        return told

    def _forward(self, micro: Any, loss_function: LossFunction | None = None) -> Loss | Terms:
        micro = to_device(micro, self._device)
        with self._precision.forward():
            loss = as_loss((loss_function or self._loss)(self.model, micro))
        if self._batchnorm is not None:
            self._batchnorm.micro()
        return loss

    def _micro_step(self, micro: Any) -> None:
        self._executor.micro_step(micro)

    def _eager(self, micro: Any, loss_function: LossFunction) -> Loss | Terms:
        loss = self._forward(micro, loss_function)
        self._window.add_loss(loss)
        return loss

    def _count(self, micros: Sequence[Any]) -> dict[str, float]:
        """All units, by term, over the window and the ranks, before the first backward."""
        assert self._units is not None
        counted = count_units(self._units, micros) or dict.fromkeys(self._counted, 0.0)
        self._counted = sorted(counted)
        sums = self._window.sync.sum([counted[name] for name in self._counted])
        return dict(zip(self._counted, sums, strict=True))

    def _close(self, micros: Sequence[Any], start: dict[str, Any] | None) -> Step:
        try:
            step = self._window.close()
            if self._batchnorm is not None:
                self._batchnorm.end_window()
            return step
        except NonFiniteError as error:
            if error.micro_batch is not None or start is None:
                raise
            index, where = find_nonfinite(self.model, micros, self._forward, start)
            raise NonFiniteError(f"{error}. {where}", micro_batch=index) from None

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
