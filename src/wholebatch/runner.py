"""The forward and backward passes of a window's micro-batches.

A `MicroStep` runs one micro-batch. A `Runner` runs those of a `WholeBatch` one after the other; if
a BatchNorm trains, there is only one, since the batch is not split. `TwoPassRunner` in
`two_pass_runner.py` is for a loss of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias
from weakref import proxy

from torch import Tensor, nn

from wholebatch.audit.foreign_writes import refuse_unreduced_steps
from wholebatch.audit.layers import warn_of_spectral_norms
from wholebatch.audit.loss_test import LossTest
from wholebatch.audit.own_loop import OF_A_LOSS, OwnLoop
from wholebatch.audit.padding import check_padding
from wholebatch.batch import Tokens, to_device
from wholebatch.batch.samples import layout_of
from wholebatch.compile import Execute, check_execute
from wholebatch.coupled.batchnorm.over_ranks import norms_over_ranks
from wholebatch.coupled.batchnorm.policies import Policy
from wholebatch.coupled.normalisation_layers import (
    NORMS,
    uses_whole_batch,
    whole_batch_norms,
)
from wholebatch.distributed.ddp import Replicated
from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.loss_functions import LossFunction
from wholebatch.losses.coupled import Coupled
from wholebatch.losses.loss import (
    Loss,
    Terms,
    as_loss,
)
from wholebatch.window.autocast import Precision
from wholebatch.window.forward_state import ForwardState
from wholebatch.window.ledger import Ledger
from wholebatch.window.observer import Plan

if TYPE_CHECKING:
    from wholebatch.compile.trace import Added

AfterMicro: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True)
class WindowRun:
    """Options for one run of a window's micro-batches."""

    reduces: bool = True
    """The last backward reduces the gradients over the ranks; otherwise the close does."""
    after_micro: AfterMicro = lambda done, of: None
    forwards: int | None = None
    """The number of micro-batches that every rank must run; None if ranks may differ."""
    stand_in: Any = None
    """A micro-batch that is not counted, for a rank that has none."""
    batches: int = 0
    """The number of batches that a trainer divides its loss by; 0 without a trainer."""


class Place(NamedTuple):
    """The place of a micro-batch in its window."""

    position: int
    """The number of micro-batches of its window before it."""
    in_parts: bool
    """True if it is not the whole global batch."""
    steps: Collection[int]
    """The numbers that a loop may divide by as its accumulation steps; empty if not known yet."""
    last: bool
    """True if its backward is the last one of the window, which reduces the gradients."""
    counts: bool = True
    """False if it only takes part in the other ranks' collectives."""


class MicroStep:
    """Forward, backward and addition of one micro-batch: by eager code, or as a graph.

    `WholeBatch` and `Accumulator.run` call it for every micro-batch.

    Args:
        loss: A function `loss(model, micro)`.
        model: What it is given.
        modules: All modules that it uses.
        ledger: Where the gradients are added.
        precision: The precision of the forward pass.
        execute: How a micro-batch is computed.
        prepare: Returns a micro-batch as the loss function gets it, before each eager call.
    """

    def __init__(
        self,
        loss: Callable[[Any, Any], Any],
        model: Any,
        *,
        modules: nn.Module,
        ledger: Ledger,
        precision: Precision,
        execute: Execute,
        prepare: Callable[[Any], Any],
    ) -> None:
        self._loss, self._model = loss, model
        self._ledger, self._precision = ledger, precision
        self._prepare = prepare
        from wholebatch.compile.micro_step import Executor  # Not needed to import wholebatch.
        from wholebatch.compile.trace import Added

        self._outcome_of = Added.of
        self.executor = Executor(
            execute,
            model=modules,
            loss=loss,
            window=ledger,
            precision=precision,
            device=ledger.target.device,
        )
        # Eager code alone, as on a CPU: decided here, not at every micro-step.
        self.is_plain = self.executor.is_eager

    @property
    def is_eager(self) -> bool:
        """True if autograd adds every gradient, so that writes of others can be told from it."""
        return self.is_plain or self.executor.is_eager

    def run(self, micro: Any, place: Place) -> Added:
        """Add the gradients of a micro-batch; return its totals, units and extras."""
        micro = self.executor.on_device(micro)
        added = self.executor.by_graph(micro, partial(self.eager, place=place))
        if added is None:
            with self.executor.by_eager_code():
                loss = self.eager(micro, place)
            added = self._outcome_of(loss)
        return added

    def eager(self, micro: Any, place: Place) -> Loss | Terms:
        """Run forward and backward by autograd, and add the gradients; return the loss."""
        micro = self._prepare(micro)
        with self._precision.forward():
            loss = as_loss(self._loss(self._model, micro))
        if self.is_eager:
            self._ledger.observer.backward_begins()
        self._ledger.add(loss, last=place.last, counts=place.counts)
        return loss


class Runner:
    """Runs one micro-batch after the other, each by the way that `execute` chooses.

    `model` is what the loss function is given; `root` holds all modules of it.
    """

    is_coupled: ClassVar[bool] = False
    """True if the loss is one of the whole batch (`wb.Coupled`)."""

    def __init__(
        self,
        model: Any,
        loss: LossFunction | Coupled,
        *,
        root: nn.Module,
        ledger: Ledger,
        precision: Precision,
        execute: Execute,
        policy: Policy | None,
        audit: bool,
    ) -> None:
        self.model, self._root = model, root
        self.policy = policy
        self._loss = loss
        self._audits, self._in_parts = audit, False
        self._looked_at_padding = False
        self._untested: Mapping[str, Any] | None = None  # the layout of a batch that was whole
        self.extras: list[Mapping[str, Tensor]] = []
        """The tensors beside the loss of each micro-batch of the window."""
        self._ledger = ledger
        self._precision = precision
        self._device = ledger.target.device
        self._before: ForwardState | None = None  # holds the running statistics before the window
        if audit:
            ledger.observer = OwnLoop(ledger.target, OF_A_LOSS)
            refuse_unreduced_steps(ledger)
        read = loss.encode if isinstance(loss, Coupled) else loss
        _refuse_lazy_parameters(root)
        warn_of_spectral_norms(root)
        shares = ledger.sync.counts_must_agree
        group = ledger.sync.group
        self._test = LossTest(root, group, enabled=audit, shares_forwards=shares)
        this = proxy(self)
        self._step = MicroStep(
            read,
            model,
            modules=root,
            ledger=ledger,
            precision=precision,
            execute=self._executed(check_execute(execute, self._device)),
            prepare=lambda micro: this._on_device(micro),
        )
        self.executor = self._step.executor

    def _executed(self, execute: Execute) -> Execute:
        """Return how micro-steps run; refuse a graph where only eager code can do it."""
        why = None
        if isinstance(self._loss, Coupled):
            why = "a loss of wb.Coupled runs encode twice (compile the encoder itself instead)"
        elif not isinstance(self.model, nn.Module):
            why = "several models"
        if why is not None and execute in ("compile", "graph"):
            raise OptionError(f'execute="{execute}": not possible here: {why}; use "auto"')
        return execute if why is None else "eager"

    # --------------------------------------------------------------- the test

    def test_window(
        self,
        batch: Any,
        micros: Sequence[Any],
        layout: Mapping[str, Any],
    ) -> None:
        """Refuse what does not add up, before windows 1, 2, 4, 8, ... of those that are split."""
        # A batch that is whole now may be cut when memory runs out: `run` tests it then.
        self._untested = None if self._are_parts(micros) else layout
        if self._untested is not None:
            return
        if not self._test.begin_window():
            return
        function = self._loss
        encodes = isinstance(function, Coupled) and function.addends is None
        if isinstance(function, Coupled):
            function = function.addends or function.encode

        def run(few: Any) -> Any:
            with self._precision.forward():
                return function(self.model, to_device(few, self._device))

        name = getattr(function, "__name__", "a function")
        self._test.test(run, batch, micros, layout, outputs=encodes, name=name)

    @property
    def tests_next_window(self) -> bool:
        """True if the next window is one of those that are tested."""
        return self._test.is_next_due

    def look_at_padding(self, batch: Any, by: Tokens, layout: Mapping[str, Any]) -> None:
        """Refuse a loss that is another one without padding, or in a row of several sequences."""
        function = self._loss.addends if isinstance(self._loss, Coupled) else self._loss
        sharded = self._ledger.sync.counts_must_agree  # a forward would need the other ranks
        if self._looked_at_padding or not self._audits or sharded or function is None:
            return

        def run(micro: Any) -> Loss | Terms:  # in full precision, where it is the loop's to choose
            return as_loss(function(self.model, to_device(micro, self._device)))

        models = self._ledger.target.models
        self._looked_at_padding = check_padding(run, layout_of(batch, **layout), by, models)

    def join_test(self) -> None:
        """Take part in the other ranks' test, without a sample."""
        if self._test.begin_window():
            self._test.join()

    # ------------------------------------------------------------ the windows

    def begin_window(self) -> None:
        """Begin an attempt at a window."""
        if self.policy is not None:
            self.policy.begin_window()
        training = [norm for _, norm in whole_batch_norms(self._root) if norm.training]
        self._before = ForwardState(*training, every=False) if training else None
        self.extras = []

    def _on_device(self, micro: Any) -> Any:
        """Copy a micro-batch to the device."""
        return to_device(micro, self._device)

    def end_window(self) -> None:
        """Note that the window has made its update."""
        self._before = None

    def discard_window(self) -> None:
        """Forget the window; one without an update leaves no trace in running statistics."""
        if self._before is not None:
            self._before.restore_buffers()
        self._before = None

    def run(self, micros: Sequence[Any], how: WindowRun) -> None:
        """Run the micro-batches.

        Where all ranks must run equally many, one with fewer micro-batches runs its last one again
        (or `how.stand_in`), with weight zero and its buffers put back.
        """
        self._prepare(micros)
        ledger, step = self._ledger, self._step
        places, of = how.forwards or len(micros), len(micros)
        steps = {of, how.batches or of}
        plan = Plan(ledger.number, self._in_parts, tuple(steps), micros=micros)
        ledger.observer.window_begins(plan)
        is_eager = step.is_plain or self._norms_meet()
        run = step.eager if is_eager else step.run
        with self._norms_over_ranks():
            for index in range(places):
                counts, last = index < of, how.reduces and index == places - 1
                place = Place(index, self._in_parts, steps, last, counts)
                if counts:
                    extras = getattr(run(micros[index], place), "extras", None)  # terms have none
                    if extras:
                        self.extras.append(extras)
                    ledger.end_micro_batch()
                else:
                    with ForwardState(*ledger.target.models):  # leaves no trace
                        run(micros[-1] if micros else how.stand_in, place)
                if counts:
                    how.after_micro(index + 1, of)

    def _prepare(self, micros: Sequence[Any]) -> None:
        """Test a batch that is cut only now, since memory ran out."""
        self._in_parts = self._are_parts(micros)
        if self._untested is not None and self._in_parts:
            layout = {**self._untested, "batch_size": None, "roles": None}
            self.test_window(micros[0], micros, layout)

    def _are_parts(self, micros: Sequence[Any]) -> bool:
        """True if these micro-batches are parts of the global batch."""
        return len(micros) > 1 or self._ledger.sync.ranks > 1

    def is_undivided(self) -> bool:
        """True if the batch must not be split: a layer trains with the statistics of the batch."""
        norms = (module for module in self._root.modules() if isinstance(module, NORMS))
        return self.policy is None and any(map(uses_whole_batch, norms))

    def _norms_meet(self) -> bool:
        """True if BatchNorms of an undivided batch run collectives."""
        return self._ledger.sync.ranks > 1 and self.is_undivided()

    def _norms_over_ranks(self) -> AbstractContextManager[None]:
        """Let BatchNorms that train normalise with the statistics of all ranks."""
        sync = self._ledger.sync
        if not self._norms_meet():
            return nullcontext()
        if sync.counts_must_agree and not isinstance(sync, Replicated):
            raise UnsupportedError(
                'batchnorm="exact" on a sharded model: it is tested with plain models and '
                'DistributedDataParallel only; use DDP, batchnorm="freeze" or GroupNorm'
            )
        return norms_over_ranks(whole_batch_norms(self._root), sync.group.sum_tensor)

    def needs_every_rank(self) -> str | None:
        """Return why no rank may be without data; None where one may."""
        if self.is_undivided():
            return 'batchnorm="exact" needs every rank at every BatchNorm'
        return None

    def frees_memory(self) -> bool:
        """Free what is kept only for speed, after running out of memory; True if there was any."""
        return self.is_undivided() and self.executor.free_memory()


def _refuse_lazy_parameters(model: nn.Module) -> None:
    """Refuse a model with parameters that have no weights yet."""
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise UnsupportedError(
                f"{name!r} is lazy and has no weights yet: run one batch through the model first"
            )
