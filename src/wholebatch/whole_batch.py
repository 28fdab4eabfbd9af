"""WholeBatch: pass the whole batch, get its exact update in the memory of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import torch
from torch import nn

from wholebatch.batch import Batches, Roles, Tokens
from wholebatch.batch.lookahead_loader import NOTHING
from wholebatch.compile import Execute
from wholebatch.coupled.two_pass import encoding_loss
from wholebatch.errors import RankError, StateError, WindowError
from wholebatch.loop import Loop, Member
from wholebatch.loss_functions import LossFunction, check_functions, modules_of
from wholebatch.losses.coupled import Coupled
from wholebatch.make_ledger import make_ledger
from wholebatch.memory.budget import Budget, has_room
from wholebatch.memory.micro_batch_fitting import Attempt, Fitting
from wholebatch.options import (
    BatchNormPolicy,
    Close,
    Memory,
    Samples,
    as_close,
    as_memory,
    known_options,
)
from wholebatch.runner import AfterMicro, WindowRun
from wholebatch.two_pass_runner import choose_runner
from wholebatch.window import precision as precisions
from wholebatch.window.close import Handover
from wholebatch.window.close_options import ClipNorm
from wholebatch.window.ledger import Turn, refuse_no_grad
from wholebatch.window.model_and_optimizer import Scheduler
from wholebatch.window.saved_state import load_state, state_of
from wholebatch.window.units import UnitsCount, UnitsFunction
from wholebatch.window.window import Step

_Batch = TypeVar("_Batch")
MicroBatch: TypeAlias = int | Tokens | Samples | Literal["auto"]


class Observer:
    """Sees the windows of a `WholeBatch`, on all ranks or on none. By default it does nothing."""

    def begin(self) -> None:
        """See a window begin, or begin again."""

    def defers_reduction(self, micro_batches: int) -> bool:
        """Return True to see the gradients of a window before they are reduced over the ranks."""
        return False

    def micro_batch_done(self, done: int) -> None:
        """See the gradients after so many micro-batches."""

    def closed(self, step: Step, *, joined: bool) -> None:
        """See the report; a rank that only `joined` had no micro-batch."""


class WholeBatch(Member):
    """Make the update of the whole batch in the memory of a micro-batch.

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

    Batches may stay in host memory: only the micro-batch is copied to the model's device. A window
    that runs out of memory starts again with smaller micro-batches. The update stays the same.

    Args:
        model: The model, or a list or dict of models.
        optimizer: One optimizer or several. With None, call `gradient(batch)` and step yourself.
        loss: A function `loss(model, micro)` that returns `wb.mean_loss(mean, units)`,
            `wb.Loss(total, units)`, `wb.Loss.terms({...})` or a tensor of per-unit losses (without
            those of ignored labels: each counts). For a loss that compares samples:
            `wb.Coupled(encode, loss)`.
        micro_batch: Samples per micro-batch, a token budget `wb.tokens(4096)`, or "auto" for the
            largest that fits `memory`. `wb.samples(8, static=...)` says how to read a batch whose
            samples are not obvious.
        units: A function `units(micro)` that counts the units before the first backward: a number,
            or one per term. A loss of several terms needs it.
        precision: "full" (or "fp32") computes in the parameters' dtype; "bf16" and "fp16" use
            autocast.
        clip_norm: Clip the gradient of the whole batch to this norm; a list gives one norm per
            parameter group.
        scheduler: A learning-rate scheduler, or several. Each is stepped once per update;
            ReduceLROnPlateau gets the loss of the batch.
        batchnorm: "exact" gives BatchNorm the statistics of the whole batch, which is then not
            split: it runs undivided, with checkpointed blocks if it must. "freeze" normalises with
            the running statistics, "allow" with those of each micro-batch, "refuse" raises an
            error.
        execute: "eager", "compile", "graph" (a recorded CUDA graph), or "auto" for the fastest
            that gives the same numbers.
        memory: A budget such as "20GiB", 0.8 of the device or "free"; or `wb.Memory(...)`, which
            can also keep the optimizer state in host memory.
        audit: Test on the first batch that its micro-batches add up, and refuse a model that
            couples its samples. False skips the test.
        close: `wb.Close(...)`, how a window ends: clipping by value, gradients that are not finite,
            a GradScaler, an EMA.

    Attributes:
        last_step: The Step of the last update; None before the first.
        observers: What sees its windows, such as a `wholebatch.tune.NoiseProbe`.
    """

    _handover: ClassVar[Handover | None] = None
    """How a trainer that makes the step gets the gradients; None without a trainer."""
    _runs_forwards: ClassVar[bool] = True
    """True if it runs the forwards of a loop's item itself."""
    _batches = 0
    """The batches of this window, if a trainer gave several."""

    @known_options(
        steps="give the whole batch and micro_batch=, the samples of a micro-batch: their number "
        "follows. Accumulator has steps=",
    )
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        *,
        loss: LossFunction | Coupled,
        micro_batch: MicroBatch = "auto",
        units: UnitsFunction | None = None,
        precision: precisions.PrecisionName = "full",
        clip_norm: ClipNorm = None,
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        batchnorm: BatchNormPolicy = "exact",
        execute: Execute = "auto",
        memory: Memory | Budget | None = None,
        audit: bool = True,
        close: Close | None = None,
    ) -> None:
        self._turn = Turn("WholeBatch.step()")  # first: it also refuses to be copied
        check_functions(loss, units)
        split, memory = Samples.of(micro_batch), as_memory(memory)
        root, models = modules_of(model)
        ledger = make_ledger(
            models,
            optimizer,
            clip_norm=clip_norm,
            scheduler=scheduler,
            memory=memory,
            close=as_close(close),
            precision=precision,
            handover=self._handover,
            fits=partial(has_room, model=root, memory=memory.budget),
        )
        target, sync = ledger.target, ledger.sync
        self.model, self._root = model, root
        self.micro_batch = split.micro_batch
        self.last_step: Step | None = None
        self._count = None if units is None else UnitsCount(units, sync.group)
        self._roles = Roles()
        self._layout: dict[str, Any] = {
            "batch_size": split.batch_size,
            "static": split.static,
            "roles": self._roles,
        }
        self._precision = precisions.choose(
            precision, target.device.type, keeps=sync.adds_to_parameters
        )
        self._ledger = ledger
        self._runner = choose_runner(
            model,
            loss,
            root=root,
            ledger=ledger,
            precision=self._precision,
            execute=execute,
            batchnorm=batchnorm,
            audit=audit,
        )
        self._fitting = Fitting(
            root,
            partial(encoding_loss, loss) if isinstance(loss, Coupled) else loss,
            target.optimizers[0],
            micro_batch=split.micro_batch,
            memory=memory.budget,
            precision=precision,
            layout=self._layout,
            sync=sync,
            is_undivided=self._runner.is_undivided,
            frees_memory=self._runner.frees_memory,
            optimizer_state=memory.optimizer_state,
        )
        if self._runner.is_coupled:
            self._fitting.recovers &= sync.ranks == 1  # beginning again, one would gather alone
        self.observers: list[Observer] = []

    def __repr__(self) -> str:
        optimizers = "+".join(
            type(optimizer).__name__ for optimizer in self._ledger.target.optimizers
        )
        return (
            f"WholeBatch({type(self._root).__name__}, {optimizers or None}, "
            f"micro_batch={self.micro_batch!r}, updates={self.updates})"
        )

    @property
    def compiling(self) -> str | None:
        """The compilation that runs in a thread, for a progress line; None if there is none."""
        return self._runner.executor.progress

    @property
    def micro_batch_size(self) -> int | None:
        """Samples in a micro-batch: the given number, or the one that fits; None before that."""
        asked = self.micro_batch if isinstance(self.micro_batch, int) else None
        return self._fitting.size or asked

    @property
    def recoveries(self) -> int:
        """Windows that ran out of memory and were restarted with smaller micro-batches."""
        return len(self._fitting.recovered)

    def step(self, batch: Any, *, after_micro: AfterMicro | None = None) -> Step:
        """Make one update from the whole batch. An error leaves nothing of the window behind.

        Args:
            batch: The whole batch: tensors, or any structure of them.
            after_micro: A function `after_micro(done, of)`, called after every micro-batch.

        Returns:
            The exact mean loss, the gradient norm and what else happened.
        """
        if not self._ledger.target.steps:
            raise WindowError(
                "step() with optimizer=None: call gradient(batch), then your own optimizer step"
            )
        with self._turn:
            self.last_step = self._update(batch, after_micro)
        return self.last_step

    def gradient(self, batch: Any, *, after_micro: AfterMicro | None = None) -> Step:
        """Leave the gradient of the whole batch in `.grad`, for your own optimizer step.

        It is normalised and clipped. No optimizer, scheduler or EMA is stepped. Clear the gradients
        after your step: the next window refuses to start on old ones.

        Args:
            batch: The whole batch, as for `step`.
            after_micro: As for `step`.
        """
        self._ledger.store.check_hand_over()
        with self._turn:
            self.last_step = self._update(batch, after_micro, steps=False)
        return self.last_step

    def choose(self, batch: Any) -> str | None:
        """Choose the micro-batch for batches like this one now; return the choice and its reason.

        On several ranks, call it on all of them.

        Args:
            batch: A batch like those of the run.

        Returns:
            Two lines of text, or None if nothing had to be measured.
        """
        with self._turn:
            self._fitting.split(batch)
        return self._fitting.said

    def _update(self, batch: Any, after_micro: AfterMicro | None, *, steps: bool = True) -> Step:
        refuse_no_grad("step()", "call it outside of them, or under torch.enable_grad()")
        ledger = self._ledger
        forwards = None
        alike = ledger.sync.counts_must_agree
        try:
            if self._meets and not alike:
                self._meet_with(1, steps)
            ledger.before_window()
            ledger.sync.before_forwards()
            micros = self._fitting.split(batch)
            if self._meets and alike:
                forwards = self._meet_with(len(micros), steps)
            self._test(batch, micros)
            known = self._known_units(micros)
            attempts: Iterable[Attempt] = [Attempt(micros, self._fitting.inside())]
            if self._fitting.may_begin_again():
                attempts = self._fitting.attempts(batch, micros, self._begin_again)
            try:
                with self._precision.window():
                    for attempt in attempts:
                        with attempt:
                            if known is not None:  # else the first loss opens the window
                                ledger.begin(known=known)
                            self._runner.begin_window()
                            for observer in self.observers:
                                observer.begin()
                            how = self._how_to_run(attempt.micros, forwards, after_micro)
                            self._runner.run(attempt.micros, how)
            except torch.OutOfMemoryError as failure:
                if ledger.open is None and ledger.sync.ranks > 1:
                    ledger.begin(0, known=known)  # the other ranks meet there
                self._fitting.agree(failure)
            self._fitting.agree()
            self._may_use_item = False
            return self._close(attempt.micros, steps)
        finally:
            ledger.sync.restore()
            ledger.discard()
            self._runner.discard_window()

    def _known_units(self, micros: Sequence[Any]) -> dict[str, float] | None:
        """Return all units of a window by term, if `units=` counts them before."""
        return None if self._count is None else self._count(micros)

    def _test(self, batch: Any, micros: Sequence[Any]) -> None:
        """Refuse what does not add up, before windows 1, 2, 4, 8, ... of those that are split."""
        like = self._fitting.sizes.largest_of(batch) if isinstance(batch, Batches) else batch
        if isinstance(self.micro_batch, Tokens):
            self._runner.look_at_padding(like, self.micro_batch, self._layout)
        self._runner.test_window(like, micros, self._layout)

    @property
    def _meets(self) -> bool:
        """True if ranks meet before a window.

        Inside `over` any rank may run out of data; forwards with collectives must be as many.
        """
        return self._ledger.sync.counts_must_agree or self._loop is not None

    def _how_to_run(
        self, micros: Sequence[Any], forwards: int | None, after_micro: AfterMicro | None
    ) -> WindowRun:
        """Return how the forwards and backwards of a window run."""

        def after(done: int, of: int) -> None:
            for observer in self.observers:
                observer.micro_batch_done(done)
            if after_micro is not None:
                after_micro(done, of)

        # A rank that must begin again would leave the others in a reduction.
        alone = self._fitting.may_begin_again() or any(
            observer.defers_reduction(len(micros)) for observer in self.observers
        )
        forwards = forwards if self._ledger.sync.counts_must_agree else None
        return WindowRun(not alone, after, forwards, batches=self._batches)

    # --------------------------------------------------------------- the loop

    def over(self, loader: Iterable[_Batch], *, ahead: bool = False) -> Iterator[_Batch]:
        """Yield the loader's batches, for `step`; ranks may have different numbers of them.

        A rank that has run out of batches joins the updates of the others with an empty one.
        Samples that a DistributedSampler repeats are left out. After `load_state_dict`, pass the
        same data from its start: the loop continues at the saved position.

        Args:
            loader: Any iterable of batches.
            ahead: Read the next batch while the device computes. Random numbers that the loader
                draws are then drawn before the step ends.
        """
        loop = Loop(loader, [self], static=self._layout["static"], ahead=ahead)
        return loop.items()

    def join(self, like: Any) -> Step:
        """Take part in the other ranks' step without data.

        Args:
            like: Any batch. It is not counted.
        """
        with self._turn:
            self.last_step = self._joined(like, self._meet_with(0) if self._meets else None)
        return self.last_step

    def _close(self, micros: Sequence[Any], steps: bool) -> Step:
        waiting = None if self._loop is None else self._loop.read_next
        step = self._ledger.close(steps=steps, while_waiting=waiting)
        for observer in self.observers:
            observer.closed(step, joined=False)
        if step.skipped is None:
            self._runner.end_window()
        return step

    # ---------------------------------------------------------- several ranks

    def _meet(self, items: int) -> tuple[int, int]:
        """Meet ranks that have a batch, if this one has none; with a batch, `step` meets them."""
        return (items, items) if items else (self._meet_with(0), 0)

    def _join(self, like: Any, most: int) -> None:
        """Take part in an update of the other ranks, without a batch."""
        with self._turn:
            self.last_step = self._joined(like, most)

    def _meet_with(self, micro_batches: int, steps: bool = True) -> int:
        """Meet the other ranks before a window; return the most micro-batches that a rank brings.

        Refuse to go on where a rank has none and every rank is needed.
        """
        most, fewest = self._ledger.sync.group.most_and_fewest(micro_batches)
        why = self._needs_every_rank(steps) if most > 0 and fewest == 0 else None
        if why is not None:
            raise RankError(
                f"a rank has no batch for this update, and {why}: give every rank equally many "
                "batches, with at least one sample each"
            )
        return most

    def _needs_every_rank(self, steps: bool) -> str | None:
        """Return the reason why every rank needs data, or None."""
        if not steps or self._ledger.leaves_gradients:
            return "after gradient() the step is made by each rank's own loop"
        return self._runner.needs_every_rank()

    def _begin_again(self) -> None:
        """Drop an attempt that ran out of memory; all ranks keep the seed they have agreed on."""
        ledger = self._ledger
        ledger.keep_seed()
        ledger.discard()
        self._runner.executor.let_go()

    def _joined(self, like: Any, forwards: int | None) -> Step:
        ledger = self._ledger
        why = self._needs_every_rank(steps=True)
        if why is not None:
            raise RankError(
                f"rank {ledger.sync.rank} has no sample of this batch, and {why}: make the batch "
                "larger"
            )
        ledger.before_window()
        ledger.sync.before_forwards()
        try:
            return self._join_with(like, forwards)
        finally:
            ledger.sync.restore()

    def _join_with(self, like: Any, forwards: int | None) -> Step:
        """Take part in every collective of the other ranks' window, in their order."""
        ledger = self._ledger
        for observer in self.observers:
            observer.begin()
        self._fitting.join()
        self._runner.join_test()
        if self._count is not None and like is not NOTHING:
            self._count.learn(like)
        known = None if self._count is None else self._count([])
        self._runner.begin_window()
        if ledger.sync.counts_must_agree:
            step = self._joined_forwards(like, known, forwards)
        else:
            self._fitting.agree()
            step = ledger.join(known)
        for observer in self.observers:
            observer.closed(step, joined=True)
        return step

    def _joined_forwards(
        self, like: Any, known: dict[str, float] | None, forwards: int | None
    ) -> Step:
        """Run as many forwards as the other ranks, none of which counts."""
        ledger = self._ledger
        if like is NOTHING:
            raise RankError(
                f"rank {ledger.sync.rank} has no data at all, and a sharded model needs every rank "
                "in every forward: give it at least one batch"
            )
        stand_in = self._fitting.split(like)[0]
        ledger.begin(0, known=known)
        with self._precision.window():
            self._runner.run((), WindowRun(forwards=forwards, stand_in=stand_in))
        return ledger.close()

    # ----------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from; save it between steps, with model and optimizer."""
        if self._turn.taken:
            raise StateError(
                "state_dict() inside step(), in the middle of a window: save after the Step. A "
                "window that was interrupted is computed again, with the same update"
            )
        feed = self._loop_state()
        own = state_of(self._ledger, "WholeBatch")
        roles = self._roles.state_dict()
        return {**own, "feed": feed, "roles": roles, **self._fitting.sizes.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Resume from a `state_dict`; call it after the model and optimizer are loaded."""
        if self._turn.taken:
            raise WindowError("load_state_dict() inside step(): leave it first")
        load_state(self._ledger, "WholeBatch", saved)
        self._load_loop_state(saved)
        self._fitting.sizes.load_state_dict(saved)
        self._roles.load_state_dict(saved["roles"])
