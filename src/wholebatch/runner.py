"""Runners: who makes the forwards and backwards of a window, and in which order.

Which one a `WholeBatch` needs is decided once, when it is made (`choose_runner`):

- `Runner` takes one micro-batch after the other.
- `LockStepRunner` is for models with BatchNorm: their micro-batches meet at every BatchNorm.
- `TwoPassRunner` is for a `wb.Coupled` loss: a first pass for the representations, a second one
  for the gradients (in lock-step, where the model has BatchNorm).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from wholebatch.batch import Tokens, batch_size_of, to_device
from wholebatch.batch.samples import layout_of
from wholebatch.compile import Execute, check_execute
from wholebatch.coupled import choose as choose_batchnorm
from wholebatch.coupled.audit import SplitGuard, check_padding
from wholebatch.coupled.batchnorm.lock_step import Hold, LockStep
from wholebatch.coupled.batchnorm.lock_step_graph import Recorder
from wholebatch.coupled.batchnorm.policies import Policy, Statistics
from wholebatch.coupled.contrastive.losses import Coupled, refuse_in_parts
from wholebatch.coupled.contrastive.two_pass import (
    KeptGraphs,
    TwoPasses,
    WholeRepresentations,
    gather_rows,
)
from wholebatch.coupled.normalisation_layers import (
    batchnorms,
    running_buffers,
    tracked_instance_norms,
)
from wholebatch.coupled.sample_draws import PerSample, WindowDraws, check_dropout
from wholebatch.errors import LossError, OptionError, UnsupportedError, WindowError
from wholebatch.losses.loss import SINGLE, Loss, Term, Terms, as_loss, terms_of
from wholebatch.stream import execute_here
from wholebatch.window.close import read_scalars
from wholebatch.window.foreign_writes import Untouched
from wholebatch.window.forward_state import ForwardState, restore_random
from wholebatch.window.precision import Precision
from wholebatch.window.window import Window

LossFunction: TypeAlias = Callable[[Any, Any], Loss | Terms | Tensor]
AfterMicro: TypeAlias = Callable[[int, int], None]
BeforeMicro: TypeAlias = Callable[[int], None]


@dataclass(frozen=True)
class WindowRun:
    """Options for one run of a window's micro-batches."""

    first: int = 0
    """The micro-batches before this one are in the window already."""
    reduces: bool = True
    """The last backward reduces the gradients over the ranks; otherwise the close does."""
    before_micro: BeforeMicro = lambda index: None
    after_micro: AfterMicro = lambda done, of: None
    numbers: Callable[[], Sequence[Sequence[int]]] = tuple
    """Return the places of each micro-batch's samples in this rank's batch."""
    stand_in: Any = None
    """A micro-batch that is not counted, for a rank that has none."""


class Runner:
    """Runs one micro-batch after the other, each by the way that `execute` chooses.

    `model` is what the loss function is given; `root` holds all modules of it.
    """

    keeping: KeptGraphs | None = None
    """Graphs that are kept between two passes, where the loss is of the whole batch."""

    def __init__(
        self,
        model: Any,
        loss: LossFunction | Coupled,
        *,
        root: nn.Module,
        window: Window,
        precision: Precision,
        execute: Execute,
        policy: Policy | None,
        dropout: PerSample | None,
        audit: bool,
    ) -> None:
        self.model, self._root = model, root
        self.policy = policy
        self._loss = loss
        self._drop = dropout
        self._draws = WindowDraws()
        self._places: dict[int, int] = {}
        self._numbers: Callable[[], Sequence[Sequence[int]]] = tuple
        self._first_number = 0
        self._audits, self._in_parts = audit, False
        self._looked_at_padding = False
        self._undivided: Mapping[str, Any] | None = None
        # Of the micro-step that runs now, for its eager code:
        self._is_last = False  # its backward reduces
        self._counts = True  # False if it only takes part in the other ranks' collectives
        self._window = window
        self._precision = precision
        self._device = window.target.device
        self._untouched = Untouched(window, by="the loss function")
        looks = audit and not window.sync.counts_must_agree
        read = loss.stand_in if isinstance(loss, Coupled) else loss
        self._guard = SplitGuard(root, window.sync, looks=looks, loss=read)
        from wholebatch.compile.micro_step import Executor  # Not needed to import wholebatch.

        self.executor = Executor(
            self._executed(execute_here(check_execute(execute, self._device))),
            model=root,
            loss=read,
            window=window,
            precision=precision,
            device=self._device,
            eager=self._eager_step,
            single=SINGLE,
            keeps_moments=isinstance(policy, Statistics),
        )
        # Eager code alone, as on a CPU: decided here, not at every micro-step.
        self._is_plain = self.executor.is_eager and dropout is None

    def _executed(self, execute: Execute) -> Execute:
        """Return how micro-steps run; refuse a graph where only eager code can do it."""
        why = None
        if isinstance(self._loss, Coupled):
            why = "a loss of wb.Coupled runs encode twice (compile the encoder itself instead)"
        elif self._drop is not None:
            why = 'dropout="per-sample" makes its masks in Python'
        elif not isinstance(self.model, nn.Module):
            why = "several models"
        if why is not None and execute in ("compile", "graph"):
            raise OptionError(f'execute="{execute}": not possible here: {why}; use "auto"')
        return execute if why is None else "eager"

    # --------------------------------------------------------------- the look

    @property
    def is_checked(self) -> bool:
        """True if no look is to come."""
        return not self._guard.pending

    def look_at(
        self,
        batch: Any,
        micros: Sequence[Any],
        layout: Mapping[str, Any],
        steps: Collection[int] = (),
    ) -> None:
        """Refuse what does not add up, before the first window that is split."""
        guard = self._guard
        guard.begin_window(self.executor.changed())
        sync = self._window.sync
        # A batch that is whole now may be cut when memory runs out: `run` looks then.
        self._undivided = layout if len(micros) == 1 else None
        if not guard.pending or (len(micros) == 1 and sync.ranks == 1):
            return
        function = self._loss
        encodes = isinstance(function, Coupled) and function.addends is None
        if isinstance(function, Coupled):
            function = function.addends or function.encode

        def run(few: Any) -> Any:
            with self._precision.look(), self._draws.micro(lambda: None):
                return function(self.model, to_device(few, self._device))

        name = getattr(function, "__name__", "a function")
        how: dict[str, Any] = {**layout, "outputs": encodes, "name": name, "steps": steps}
        guard.look(run, batch, micros, **how)
        self._share_that_draws_are_used()

    def look_at_padding(self, batch: Any, by: Tokens, layout: Mapping[str, Any]) -> None:
        """Refuse a loss that is another one without padding, or in a row of several sequences."""
        function = self._loss.addends if isinstance(self._loss, Coupled) else self._loss
        sharded = self._window.sync.counts_must_agree  # a forward would need the other ranks
        if self._looked_at_padding or not self._audits or sharded or function is None:
            return

        def run(micro: Any) -> Loss | Terms:  # in full precision, where it is the loop's to choose
            return as_loss(function(self.model, to_device(micro, self._device)))

        models = self._window.target.models
        self._looked_at_padding = check_padding(run, layout_of(batch, **layout), by, models)

    def join_look(self) -> None:
        """Take part in the other ranks' look, without a sample."""
        if self._guard.pending:
            self._guard.join()
            self._share_that_draws_are_used()

    def _share_that_draws_are_used(self) -> None:
        """Let all ranks know if the loss draws numbers that follow their samples."""
        self._draws.used = bool(self._window.sync.sum([float(self._draws.used)])[0])

    # ------------------------------------------------------------ the windows

    @property
    def numbers_samples(self) -> bool:
        """True if `begin_window` needs to know how many samples there are."""
        return self._drop is not None or self._draws.used

    def begin_window(self, samples: int = 0) -> None:
        """Begin an attempt at a window of so many samples."""
        self._untouched.forget()
        if self.policy is not None:
            self.policy.begin_window()
        seed = self._agree_on_samples(samples) if self.numbers_samples else None
        self._draws.begin_window(seed, self._window.sync.ranks)
        if self._drop is not None:
            self._drop.begin_window(seed)

    def _agree_on_samples(self, samples: int) -> int:
        """Agree on one seed for all ranks, and a number for every sample of the global batch."""
        sync = self._window.sync
        seed = PerSample.draw_seed()
        values = [0.0] * (1 + sync.ranks)
        values[0] = float(seed) if sync.rank == 0 else 0.0
        values[1 + sync.rank] = float(samples)
        values = sync.sum(values)
        self._first_number = int(sum(values[1 : 1 + sync.rank]))
        return int(values[0])

    def end_window(self) -> None:
        """Take note that the window's update is made."""
        self._draws.end_window()
        if self.policy is not None:
            self.policy.end_window()

    def discard_window(self) -> None:
        """Forget the window, whatever became of it."""
        self._draws.leave()
        if self.policy is not None:
            self.policy.discard_window()

    def run(self, micros: Sequence[Any], how: WindowRun) -> None:
        """Run the micro-batches.

        Where all ranks must run equally many forwards, one with fewer micro-batches runs its last
        one again (or `how.stand_in`), with weight zero and its buffers put back.
        """
        micro_step = self._eager_step if self._is_plain else self.micro_step
        with self._prepared(micros, how):
            places, sync = len(micros), self._window.sync
            if sync.counts_must_agree:
                places = int(sync.largest(torch.tensor(float(places), device=self._device)))
            sync.before_forwards()
            for index in range(how.first, places):
                self._is_last = how.reduces and index == places - 1
                how.before_micro(index)
                if index < len(micros):
                    self._draws.enter(partial(self._numbers_at, index))
                    micro_step(micros[index])
                    self._draws.leave()
                    self._window.micro_batch_done()
                    how.after_micro(index + 1, len(micros))
                else:
                    self._run_weightless(micros[-1] if micros else how.stand_in)

    @contextmanager
    def _prepared(self, micros: Sequence[Any], how: WindowRun) -> Iterator[None]:
        """Look at a batch that is cut only now; put the random state back after the run."""
        sync = self._window.sync
        self._in_parts = len(micros) > 1 or sync.ranks > 1
        is_cut = self._undivided is not None and len(micros) > 1 and sync.ranks == 1
        if is_cut:
            self.look_at(micros[0], micros, {**(self._undivided or {}), "batch_size": None})
        self._places = {id(micro): place for place, micro in enumerate(micros)}
        self._numbers = cache(how.numbers)
        drawn = None if self._drop is None else torch.get_rng_state()
        yield
        if drawn is not None:  # the window has drawn its seed, and nothing else counts
            torch.set_rng_state(drawn)

    def _run_weightless(self, micro: Any) -> None:
        """Take part in the collectives of a micro-batch, and leave no trace of it."""
        self._counts = False
        with ForwardState(*self._window.target.models):
            self.micro_step(micro)
        self._counts = True

    def in_lock_step(self, micros: Sequence[Any]) -> bool:
        """Return True if these micro-batches have to run together."""
        return False

    def needs_lock_step(self) -> bool:
        """Return True if a BatchNorm would use batch statistics now."""
        return False

    def needs_every_rank(self) -> str | None:
        """Return why no rank may be without data; None where one may."""
        if isinstance(self.policy, Statistics) and self.policy.spans_ranks:
            return 'batchnorm="statistics" merges the running statistics of every rank'
        return None

    def hold(self, hold: Hold) -> None:
        """Begin with holding this much of lock-step; there is none here."""

    # ---------------------------------------------------------- a micro-batch

    def micro_step(self, micro: Any) -> None:
        """Run forward and backward of a micro-batch, and enter it in the window."""
        with nullcontext() if self._drop is None else self._sampling(micro):
            self.executor.micro_step(micro)

    def forward(self, micro: Any, loss_function: LossFunction | None = None) -> Loss | Terms:
        """Return the loss of a micro-batch, in the window's precision and on its device."""
        with self._sampling(micro):
            return self._loss_of(micro, loss_function or self._loss)

    def _eager_step(self, micro: Any, loss_function: LossFunction | None = None) -> Loss | Terms:
        """Run forward and backward by autograd; return the loss."""
        loss = self._loss_of(micro, loss_function or self._loss)
        if self._is_plain or self.executor.is_eager:
            self._untouched.check()
            self._window.add_loss(loss, last=self._is_last, counts=self._counts)
            self._untouched.remember()
        else:  # a graph may have added to the gradients since the last eager micro-step
            self._window.add_loss(loss, last=self._is_last, counts=self._counts)
        return loss

    def _loss_of(self, micro: Any, loss_function: LossFunction | Coupled) -> Loss | Terms:
        assert not isinstance(loss_function, Coupled)
        micro = to_device(micro, self._device)
        with self._precision.forward():
            loss = as_loss(loss_function(self.model, micro))
        if self._in_parts and self._audits and type(loss) is not Loss:
            refuse_in_parts(loss)
        if self.policy is not None:
            self.policy.micro()
        return loss

    @contextmanager
    def _sampling(self, micro: Any) -> Iterator[None]:
        """Give dropout's masks, and draws that follow their samples, those of `micro`."""
        place = self._places.get(id(micro))
        if place is None:  # a stand-in, which is not counted
            numbers: Callable[[], Sequence[int]] = partial(range, batch_size_of(micro))
        else:
            numbers = partial(self._numbers_at, place)
        with self._draws.micro(numbers):
            if self._drop is None:
                yield
                return
            with self._drop.micro(torch.tensor(numbers())):
                yield

    def _numbers_at(self, place: int) -> list[int]:
        """Return the numbers in the global batch of the samples of a micro-batch."""
        return [number + self._first_number for number in self._numbers()[place]]

    def find_nonfinite(
        self, micros: Sequence[Any], start: dict[str, Any]
    ) -> tuple[int | None, str]:
        """Return the first micro-batch whose gradient is not finite, and a sentence that says so.

        `start` is the random state before the first of them; buffers and random state are left as
        they are found.
        """
        named = [(name, p) for name, p in self._root.named_parameters() if p.requires_grad]
        parameters = [parameter for _, parameter in named]
        with ForwardState(self._root):
            restore_random(start)
            for index, micro in enumerate(micros):
                totals = [term.total for term in terms_of(self.forward(micro)).values()]
                gradients = torch.autograd.grad(totals, parameters, allow_unused=True)
                for (name, _), gradient in zip(named, gradients, strict=True):
                    if gradient is not None and not bool(torch.isfinite(gradient).all()):
                        return index, (
                            f"Replayed, micro-batch {index + 1} of {len(micros)} is the first "
                            f"whose gradient is not finite, at parameter {name}"
                        )
        return None, (
            "Replayed, no micro-batch has such a gradient alone: their sum overflows, or a "
            "gradient hook or on_gradient= has made it so"
        )

    # ----------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return what an open window holds beside its gradients."""
        return {
            "batchnorm": None if self.policy is None else self.policy.state_dict(),
            "draws": self._draws.state(),
            "first_number": self._first_number,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on with the window of `state_dict`."""
        if self.policy is not None and saved["batchnorm"] is not None:
            self.policy.load_state_dict(saved["batchnorm"])
        self._first_number = saved["first_number"]
        self._draws.used, seed = saved["draws"]
        self._draws.begin_window(seed, self._window.sync.ranks)
        if self._drop is not None and seed is not None:
            self._drop.begin_window(seed)


class LockStepRunner(Runner):
    """Runs micro-batches together, so that they meet at every BatchNorm.

    One whose BatchNorms are in eval mode, or a window of one micro-batch in one process, needs no
    meeting and runs as in `Runner`.
    """

    def __init__(
        self, *given: Any, root: nn.Module, hold: Hold | Literal["auto"], **options: Any
    ) -> None:
        super().__init__(*given, root=root, **options)
        window, sync = self._window, self._window.sync
        self._norms = [norm for _, norm in (*batchnorms(root), *tracked_instance_norms(root))]
        self._before: list[tuple[Tensor, Tensor]] = []  # running statistics, and copies of them
        reduce = sync.sum_tensor if sync.ranks > 1 else None
        waits = self._untouched.remember
        self._lock_step = LockStep(root, hold=hold, reduce=reduce, waits=waits)
        self.recorder = Recorder(
            self._lock_step,
            model=root,
            loss=self._loss.stand_in if isinstance(self._loss, Coupled) else self._loss,
            window=window,
            forward=self.forward,
            execute=self.executor.execute,
            sixteen_bit=self._precision.name != "full",
        )

    def hold(self, hold: Hold) -> None:
        """Begin with holding this much on the device; less, if memory runs out all the same."""
        self._lock_step.begin_with(hold)

    def in_lock_step(self, micros: Sequence[Any]) -> bool:
        """Return True if these micro-batches have to run together."""
        many = len(micros) > 1 or self._window.sync.ranks > 1
        return many and self.needs_lock_step()

    def needs_lock_step(self) -> bool:
        """Return True if a norm uses batch statistics now, or moves running ones."""
        return self.policy is None and self._lock_step.is_needed()

    def needs_every_rank(self) -> str | None:
        if self.needs_lock_step():
            return 'batchnorm="exact" needs every rank at every BatchNorm'
        return super().needs_every_rank()

    def begin_window(self, samples: int = 0) -> None:
        super().begin_window(samples)
        moving = self._norms if self.needs_lock_step() else ()
        buffers = [b for norm in moving for b in running_buffers(norm).values()]
        self._before = [(buffer, buffer.clone()) for buffer in buffers]

    def end_window(self) -> None:
        super().end_window()
        self._before = []

    def discard_window(self) -> None:
        """Forget the window; one without an update leaves no trace in running statistics."""
        super().discard_window()
        for buffer, before in self._before:
            buffer.copy_(before)
        self._before = []

    def run(self, micros: Sequence[Any], how: WindowRun) -> None:
        """Run all micro-batches together where they must meet, else one after the other."""
        if not self.in_lock_step(micros):
            super().run(micros, how)
            return
        self._refuse_sharded()
        with self._prepared(micros, how):
            if how.first < len(micros):
                self._run_together(micros)
                how.after_micro(len(micros), len(micros))

    def _refuse_sharded(self) -> None:
        if self._window.sync.counts_must_agree:
            raise UnsupportedError(
                'batchnorm="exact" on a sharded model: its forwards run collectives of their own, '
                'which cannot wait in step; use DDP, "statistics", "freeze", "group" or "layer"'
            )

    def _run_together(self, micros: Sequence[Any]) -> None:
        def forward(micro: Any) -> tuple[Any, Loss | Terms]:
            return micro, self.forward(micro)

        def backward(made: tuple[Any, Loss | Terms]) -> None:
            # A checkpointed block draws its masks again.
            with self._sampling(made[0]), self._untouched.backward():
                self._window.add_loss(made[1])
            self._window.micro_batch_done()

        self._untouched.note_rates()  # all losses may come before the first backward
        self.recorder.run(micros, forward=forward, backward=backward)


class TwoPassRunner(LockStepRunner):
    """Runs a loss of the whole batch: representations first, then their gradients.

    Every rank computes the whole loss from all representations and scales it by 1 / ranks. So the
    sum over the ranks is one loss, also for parameters that only the loss uses.
    """

    def __init__(self, model: Any, loss: Coupled, **options: Any) -> None:
        super().__init__(model, loss, **options)
        sync = self._window.sync
        if sync.grows_own_graph or sync.counts_must_agree:
            raise UnsupportedError(
                f"wb.Coupled on a model of {type(sync).__name__}: its forwards run collectives "
                "of their own, and the two passes are tested with plain modules and "
                "DistributedDataParallel (without SyncBatchNorm) only; use those"
            )
        self._coupled = loss
        self.keeping: KeptGraphs = KeptGraphs(loss.keep, self._window.target.models)
        self._finite: list[Tensor] = []

    def needs_every_rank(self) -> str | None:
        return "a loss of the whole batch (wb.Coupled) needs the representations of every rank"

    def run(self, micros: Sequence[Any], how: WindowRun) -> None:
        """Run both passes over all micro-batches; one is done after its second pass.

        In lock-step, the micro-batches of a pass meet at every BatchNorm, and are done all at once.
        """
        if self.in_lock_step(micros):
            self._refuse_sharded()
        with self._prepared(micros, how):
            self._run_passes(micros, how, alone=not self.in_lock_step(micros))

    def _run_passes(self, micros: Sequence[Any], how: WindowRun, *, alone: bool) -> None:
        window, policy = self._window, self.policy

        def begin(index: int) -> None:
            how.before_micro(index)
            if policy is not None:
                policy.micro()

        def encode(micro: Any) -> Any:
            with self._sampling(micro), self._precision.forward():
                return self._coupled.encode(self.model, to_device(micro, self._device))

        def inject(index: int, outputs: list[Tensor], gradients: list[Tensor]) -> None:
            last = how.reduces and alone and window.current.micro_batches == len(micros) - 1
            # A checkpointed block draws its masks again.
            with self._sampling(micros[index]):
                if outputs:
                    with self._untouched.backward():
                        window.backward(outputs, gradients, last=last)
                window.micro_batch_done()
                if alone:
                    how.after_micro(window.current.micro_batches, len(micros))

        passes = TwoPasses(
            micros,
            encode,
            modules=window.target.models,
            before_micro=begin,
            lock_step=None if alone else self._lock_step,
            # A policy that counts forwards counts those of the second pass: all must run again.
            keep=self.keeping.number() if policy is None and alone else 0,
        )
        try:
            whole = passes.first()
            torch.clear_autocast_cache()  # Casts made without a graph pass no gradient back.
            if policy is not None:
                policy.begin_window()  # It counts the second pass only.
            self._add_loss(whole, may_retry=bool(passes.kept))
            passes.second(whole, inject, self._coupled.tolerance, weighing=self.keeping.weighing)
        except torch.OutOfMemoryError:
            self.keeping.ran_out()
            raise
        self._finite = passes.finite
        if not alone:
            how.after_micro(len(micros), len(micros))

    def _add_loss(self, whole: WholeRepresentations, *, may_retry: bool) -> None:
        """Compute the loss of the whole batch and run its backward into the representations."""
        sync = self._window.sync
        gather = partial(gather_rows, sync=sync) if sync.ranks > 1 else None
        try:
            with self._precision.forward():
                loss = as_loss(self._coupled.loss(whole.for_loss(gather)))
            self._backward(loss, [leaf for leaf in whole.tensors if leaf.requires_grad])
        except torch.OutOfMemoryError as error:
            if may_retry:
                raise
            # Smaller micro-batches would not help: do not raise an out-of-memory error.
            raise WindowError(
                f"the loss of the whole batch ran out of memory ({str(error).splitlines()[0]}): it "
                f"holds the representations of all {len(whole.tensors[0])} samples and what it "
                "computes from them; compute it in fewer rows at a time (the ready losses have "
                "rows=), or make the representations or the batch smaller"
            ) from None

    def _backward(self, loss: Loss | Terms, leaves: list[Tensor]) -> None:
        """Record the loss, and run its backward into the leaves and its own parameters."""
        terms = terms_of(loss)
        units = self._agreed_units(terms)
        window, sync = self._window.begin(known=units), self._window.sync
        if terms.keys() == {SINGLE}:
            window.round_seed(terms[SINGLE].total)
        share = 1.0 / sync.ranks
        seeds = [
            window.seed_of(name, term.total, term.weight) * share for name, term in terms.items()
        ]
        own = 1.0 if sync.rank == 0 else 0.0  # All losses are equal: count only one.
        window.record(
            {name: term.total.detach() * own for name, term in terms.items()},
            {name: units[name] * own for name in terms},
            {name: term.weight for name, term in terms.items()},
        )
        window.owners.clear()  # The loss belongs to no single micro-batch.
        with self._untouched.backward():
            self._window.backward([term.total for term in terms.values()], seeds, also=leaves)

    def _agreed_units(self, terms: Mapping[str, Term]) -> dict[str, float]:
        """Return the units of each term; raise LossError if the ranks' losses differ."""
        read = read_scalars(
            [
                *(term.units for term in terms.values()),
                *(term.total.detach() for term in terms.values()),
            ]
        )
        sync = self._window.sync
        if sync.ranks > 1:
            for own, summed in zip(read, sync.sum(read), strict=True):
                if math.isfinite(own) and not math.isclose(
                    summed, own * sync.ranks, rel_tol=1e-4, abs_tol=1e-6
                ):
                    raise LossError(
                        "the loss of the whole batch differs between the ranks (here "
                        f"{own:g}, on average {summed / sync.ranks:g}): loss(all) is given the "
                        "representations of all ranks and must be the same function of them on each"
                    )
        return dict(zip(terms, read, strict=False))

    def find_nonfinite(
        self, micros: Sequence[Any], start: dict[str, Any]
    ) -> tuple[int | None, str]:
        finite = [bool(flag) for flag in self._finite]
        if all(finite):
            return None, "The representations are finite: it is the loss, or its way back"
        index = finite.index(False)
        return index, (
            f"Micro-batch {index + 1} of {len(finite)} is the first whose representations are not "
            "finite"
        )


def choose_runner(
    model: Any,
    loss: LossFunction | Coupled,
    *,
    root: nn.Module,
    window: Window,
    batchnorm: str,
    hold: Hold | Literal["auto"],
    dropout: str,
    **options: Any,
) -> Runner:
    """Return the runner that this model and loss need; refuse options that do not go together."""
    sync = window.sync
    drop = check_dropout(dropout, root)
    policy = None
    if batchnorm != "exact":
        reduce = None if sync.counts_must_agree or sync.ranks == 1 else sync.sum_tensor
        policy = choose_batchnorm(batchnorm, root, reduce=reduce)
    if batchnorm == "sync" and sync.ranks > 1:
        sync.counts_must_agree = True  # its layers meet the other ranks' in every forward
    options.update(root=root, window=window, policy=policy, dropout=drop)
    if isinstance(loss, Coupled):
        return TwoPassRunner(model, loss, hold=hold, **options)
    has_norms = bool(batchnorms(root) or tracked_instance_norms(root))
    if hold != "auto" or (policy is None and has_norms):
        return LockStepRunner(model, loss, hold=hold, **options)
    return Runner(model, loss, **options)


def check_functions(loss: object, units: object) -> None:
    """Refuse what cannot be called, and units where the loss brings its own."""
    if isinstance(loss, Coupled):
        if units is not None:
            raise OptionError(
                "units= with wb.Coupled: the loss of the whole batch returns its units before any "
                "backward; leave units= out"
            )
    elif not callable(loss) or isinstance(loss, nn.modules.loss._Loss):
        raise OptionError(
            f"loss={loss!r}: must be a function of the model and a micro-batch, such as lambda "
            "model, micro: wb.cross_entropy(model(micro[0]), micro[1]), or wb.Coupled"
        )
    if units is not None and not callable(units):
        raise OptionError(f"units={units!r}: must be a function")


def modules_of(model: Any) -> tuple[nn.Module, list[nn.Module]]:
    """One module that holds everything, and the models one by one."""
    if isinstance(model, nn.Module):
        return model, [model]
    several = isinstance(model, Mapping | Sequence)
    models = list(model.values() if isinstance(model, Mapping) else model) if several else []
    if not models or not all(isinstance(one, nn.Module) for one in models):
        raise OptionError(
            f"model={type(model).__name__}: must be an nn.Module, or a list or dict of them"
        )
    if isinstance(model, Mapping):
        return nn.ModuleDict(dict(model)), models
    return nn.ModuleList(models), models
