"""Runners: run the forward and backward passes of a window's micro-batches.

`choose_runner` decides once, when a `WholeBatch` is created, which one it needs:

- `Runner` takes one micro-batch after the other. If a BatchNorm trains, there is only one: the
  batch is not split.
- `TwoPassRunner` is for a `wb.Coupled` loss: a first pass for the representations, a second one
  for the gradients.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from wholebatch.batch import Tokens, to_device
from wholebatch.batch.samples import layout_of
from wholebatch.compile import Execute, check_execute
from wholebatch.coupled import choose as choose_batchnorm
from wholebatch.coupled.additivity import AdditivityTest, WindowData
from wholebatch.coupled.batchnorm.over_ranks import norms_over_ranks
from wholebatch.coupled.batchnorm.policies import Policy
from wholebatch.coupled.coupling_layers import refuse_lazy_parameters, warn_of_spectral_norms
from wholebatch.coupled.mean_units import MeanUnits
from wholebatch.coupled.normalisation_layers import (
    batchnorms,
    refuse_new_norms,
    running_buffers,
    uses_whole_batch,
    whole_batch_norms,
)
from wholebatch.coupled.padding import check_padding
from wholebatch.coupled.two_pass import (
    TwoPasses,
    WholeRepresentations,
    gather_rows,
)
from wholebatch.distributed.ddp import Replicated
from wholebatch.errors import LossError, OptionError, UnsupportedError, WindowError
from wholebatch.losses.coupled import Coupled
from wholebatch.losses.loss import (
    Loss,
    Term,
    Terms,
    as_loss,
    cross_entropy,
    refuse_in_parts,
    terms_of,
)
from wholebatch.window.autocast import Precision
from wholebatch.window.close import read_scalars
from wholebatch.window.foreign_writes import Untouched
from wholebatch.window.forward_state import ForwardState
from wholebatch.window.window import Window, is_tested_window

_log = logging.getLogger("wholebatch")

LossFunction: TypeAlias = Callable[[Any, Any], Loss | Terms | Tensor]
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
        window: Window,
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
        self._undivided: Mapping[str, Any] | None = None
        # Of the micro-step that runs now, for its eager code:
        self._is_last = False  # its backward reduces
        self._counts = True  # False if it only takes part in the other ranks' collectives
        self.extras: list[Mapping[str, Tensor]] = []
        """The tensors beside the loss of each micro-batch of the window."""
        self._window = window
        self._precision = precision
        self._device = window.target.device
        self._norms = whole_batch_norms(root)
        self._before: ForwardState | None = None  # holds the running statistics before the window
        self._is_tested = True  # this window is one of 1, 2, 4, 8, ...
        self._untouched = Untouched(window, by="the loss function")
        self._means = MeanUnits()
        read = loss.encode if isinstance(loss, Coupled) else loss
        refuse_lazy_parameters(root)
        warn_of_spectral_norms(root)
        self._known_norms = {module for _, module in batchnorms(root)}
        shares = window.sync.counts_must_agree
        self._test = AdditivityTest(
            root, window.sync, enabled=audit, shares_forwards=shares, loss=read
        )
        from wholebatch.compile.micro_step import Executor  # Not needed to import wholebatch.

        self.executor = Executor(
            self._executed(check_execute(execute, self._device)),
            model=root,
            loss=read,
            window=window,
            precision=precision,
            device=self._device,
            eager=self._eager_step,
        )
        # Eager code alone, as on a CPU: decided here, not at every micro-step.
        self._is_plain = self.executor.is_eager

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
        steps: Collection[int] = (),
    ) -> None:
        """Refuse what does not add up, before windows 1, 2, 4, 8, ... of those that are split."""
        sync = self._window.sync
        # A batch that is whole now may be cut when memory runs out: `run` tests it then.
        self._undivided = layout if len(micros) == 1 else None
        if len(micros) == 1 and sync.ranks == 1:
            return
        if not self._test.begin_window(None if self._is_plain else self.executor.changed()):
            return
        function = self._loss
        encodes = isinstance(function, Coupled) and function.addends is None
        if isinstance(function, Coupled):
            function = function.addends or function.encode

        def run(few: Any) -> Any:
            with self._precision.forward():
                return function(self.model, to_device(few, self._device))

        refuse_new_norms([self._root], self._known_norms)
        name = getattr(function, "__name__", "a function")
        self._test.test(run, WindowData(batch, micros, layout, steps), outputs=encodes, name=name)

    @property
    def is_tested(self) -> bool:
        """True if the next window is not one of those that are tested."""
        return not self._test.is_next_due

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

    def join_test(self) -> None:
        """Take part in the other ranks' test, without a sample."""
        if self._test.begin_window():
            self._test.join()

    # ------------------------------------------------------------ the windows

    def begin_window(self, before: ForwardState | None) -> None:
        """Begin an attempt at a window; `before` is the state of the model, if it was copied."""
        self._is_tested = is_tested_window(self._window.number)
        self._untouched.forget()
        if self._is_tested:
            self._means.begin_window()
        if self.policy is not None:
            self.policy.begin_window()
        if before is None:
            before = ForwardState(*(norm for _, norm in self._norms if norm.training), every=False)
        self._before = before
        self.extras = []

    def _before_code(self) -> None:
        """Copy the attributes of the model before its Python runs; a recorded graph runs none."""
        if self._before is not None:
            self._before.read_attributes()

    def end_window(self) -> None:
        """Note that the window has made its update."""
        self._before = None

    def discard_window(self) -> None:
        """Forget the window; one without an update leaves no trace in running statistics."""
        if self._before is not None:
            moved = {(id(m), name) for _, m in self._norms for name in running_buffers(m)}
            self._before.restore(only=moved)
        self._before = None

    def run(self, micros: Sequence[Any], how: WindowRun) -> None:
        """Run the micro-batches.

        Where all ranks must run equally many, one with fewer micro-batches runs its last one again
        (or `how.stand_in`), with weight zero and its buffers put back.
        """
        micro_step = self._eager_step if self._is_plain else self.micro_step
        self._prepare(micros)
        places = how.forwards or len(micros)
        with self._norms_over_ranks():
            for index in range(places):
                self._is_last = how.reduces and index == places - 1
                if index < len(micros):
                    micro_step(micros[index])
                    self._window.micro_batch_done()
                    how.after_micro(index + 1, len(micros))
                else:
                    self._run_weightless(micros[-1] if micros else how.stand_in)

    def _prepare(self, micros: Sequence[Any]) -> None:
        """Test a batch that is cut only now, since memory ran out."""
        sync = self._window.sync
        self._in_parts = len(micros) > 1 or sync.ranks > 1
        is_cut = self._undivided is not None and len(micros) > 1 and sync.ranks == 1
        if is_cut:
            layout = {**(self._undivided or {}), "batch_size": None}
            self.test_window(micros[0], micros, layout, steps=[len(micros)])

    def _run_weightless(self, micro: Any) -> None:
        """Take part in the collectives of a micro-batch, and leave no trace of it."""
        self._counts = False
        with ForwardState(*self._window.target.models):
            self.micro_step(micro)
        self._counts = True

    def is_undivided(self) -> bool:
        """True if the batch must not be split: a layer trains with the statistics of the batch."""
        return self.policy is None and any(uses_whole_batch(norm) for _, norm in self._norms)

    def _norms_over_ranks(self) -> AbstractContextManager[None]:
        """Let BatchNorms that train normalise with the statistics of all ranks."""
        sync = self._window.sync
        if sync.ranks == 1 or not self.is_undivided():
            return nullcontext()
        if sync.counts_must_agree and not isinstance(sync, Replicated):
            raise UnsupportedError(
                'batchnorm="exact" on a sharded model: it is tested with plain models and '
                'DistributedDataParallel only; use DDP, batchnorm="freeze" or GroupNorm'
            )
        return norms_over_ranks(self._norms, sync.sum_tensor)

    def needs_every_rank(self) -> str | None:
        """Return why no rank may be without data; None where one may."""
        if self.is_undivided():
            return 'batchnorm="exact" needs every rank at every BatchNorm'
        return None

    def frees_memory(self) -> bool:
        """Free what is kept only for speed, after running out of memory; True if there was any."""
        return self.is_undivided() and self.executor.free_memory()

    # ---------------------------------------------------------- a micro-batch

    def micro_step(self, micro: Any) -> None:
        """Run forward and backward of a micro-batch, and enter it in the window."""
        if self._window.sync.ranks > 1 and self.is_undivided():
            self._eager_step(micro)  # with collectives in every BatchNorm
        else:
            extras = self.executor.micro_step(micro).extras
            if extras and self._counts:
                self.extras.append(extras)

    def forward(self, micro: Any, loss_function: LossFunction | None = None) -> Loss | Terms:
        """Return the loss of a micro-batch, in the window's precision and on its device."""
        return self._loss_of(micro, loss_function or self._loss)

    def _eager_step(self, micro: Any, loss_function: LossFunction | None = None) -> Loss | Terms:
        """Run forward and backward by autograd; return the loss."""
        loss = self._loss_of(micro, loss_function or self._loss)
        # A graph may have added to the gradients since the last eager micro-step.
        is_eager = self._is_plain or self.executor.is_eager
        with self._guarded() if is_eager else nullcontext():
            self._window.add_loss(loss, last=self._is_last, counts=self._counts)
        if self._is_plain and self._counts and isinstance(loss, Loss) and loss.extras:
            self.extras.append(loss.extras)
        return loss

    def _guarded(self) -> AbstractContextManager[None]:
        """Refuse writes by the loss function to the window, before this backward."""
        return self._untouched.backward()

    def _loss_of(self, micro: Any, loss_function: LossFunction | Coupled) -> Loss | Terms:
        assert not isinstance(loss_function, Coupled)
        micro = to_device(micro, self._device)
        self._before_code()
        with self._precision.forward():
            loss = as_loss(loss_function(self.model, micro))
        if self._in_parts and self._audits and type(loss) is not Loss:
            refuse_in_parts(loss)
        if self._in_parts and self._audits and self._is_tested and self._counts:
            self._means.add_loss(loss)
        self._test.read(loss)
        return loss


class TwoPassRunner(Runner):
    """Runs a loss of the whole batch: representations first, then their gradients.

    Every rank computes the whole loss from all representations and scales it by 1 / ranks. So the
    sum over the ranks is one loss, also for parameters that only the loss uses. A batch that is
    not split is encoded once: its graph is kept between the passes.
    """

    is_coupled = True

    def __init__(self, model: Any, loss: Coupled, **options: Any) -> None:
        super().__init__(model, loss, **options)
        sync = self._window.sync
        if sync.grows_own_graph or sync.counts_must_agree:
            raise UnsupportedError(
                f"wb.Coupled on a model of {type(sync).__name__}: its forward runs collectives, "
                "and the two passes are tested only with plain modules and "
                "DistributedDataParallel (without SyncBatchNorm); use one of those"
            )
        self._coupled = loss
        self._keep = loss.keep

    def needs_every_rank(self) -> str | None:
        return "a loss of the whole batch (wb.Coupled) needs the representations of every rank"

    def frees_memory(self) -> bool:
        if not self._keep or self.is_undivided():
            return False
        self._keep = 0
        _log.warning("out of memory: no graphs of the first pass are kept any more")
        return True

    def run(self, micros: Sequence[Any], how: WindowRun) -> None:
        """Run both passes over all micro-batches; one is done after its second pass."""
        self._prepare(micros)
        with self._norms_over_ranks():
            self._run_passes(micros, how)

    def _run_passes(self, micros: Sequence[Any], how: WindowRun) -> None:
        window = self._window

        def encode(micro: Any) -> Any:
            self._before_code()
            with self._precision.forward():
                return self._coupled.encode(self.model, to_device(micro, self._device))

        def inject(index: int, outputs: list[Tensor], gradients: list[Tensor]) -> None:
            last = how.reduces and window.current.micro_batches == len(micros) - 1
            if outputs:
                with self._guarded():
                    window.backward(outputs, gradients, last=last)
            window.micro_batch_done()
            how.after_micro(window.current.micro_batches, len(micros))

        passes = TwoPasses(
            micros,
            encode,
            modules=window.target.models,
            keep=max(1, self._keep) if len(micros) == 1 else self._keep,
        )
        whole = passes.first()
        torch.clear_autocast_cache()  # Casts made without a graph pass no gradient back.
        self._add_loss(whole, may_retry=bool(passes.kept))
        passes.second(whole, inject, self._coupled.tolerance)

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
                f"holds the representations of all {len(whole.tensors[0])} samples and everything "
                "computed from them. Compute fewer rows at a time (the losses of wb.losses have "
                "rows=), or make the representations or the batch smaller"
            ) from None

    def _backward(self, loss: Loss | Terms, leaves: list[Tensor]) -> None:
        """Record the loss, and run its backward into the leaves and its own parameters."""
        terms = terms_of(loss)
        units = self._agreed_units(terms)
        window, sync = self._window.begin(known=units), self._window.sync
        if window.has_terms:
            window.fix_seeds(terms)  # all ranks have the same terms
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
        with self._guarded():
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
                        f"the loss of the whole batch differs between the ranks (here {own:g}, on "
                        f"average {summed / sync.ranks:g}): loss(all) gets the representations of "
                        "all ranks and must return the same value on every rank"
                    )
        return dict(zip(terms, read, strict=False))


def choose_runner(
    model: Any,
    loss: LossFunction | Coupled,
    *,
    root: nn.Module,
    window: Window,
    batchnorm: str,
    **options: Any,
) -> Runner:
    """Return the runner that this model and loss need; refuse options that do not go together."""
    policy = None if batchnorm == "exact" else choose_batchnorm(batchnorm, root)
    options.update(root=root, window=window, policy=policy)
    if isinstance(loss, Coupled):
        return TwoPassRunner(model, loss, **options)
    return Runner(model, loss, **options)


_SUCH_AS = "such as lambda model, micro: wb.cross_entropy(model(micro[0]), micro[1])"


def check_functions(loss: object, units: object) -> None:
    """Refuse a loss that is not callable, and `units=` with a loss that has its own units."""
    if isinstance(loss, Coupled):
        if units is not None:
            raise OptionError(
                "units= with wb.Coupled: the loss of the whole batch returns its units before any "
                "backward; leave units= out"
            )
    elif not callable(loss) or isinstance(loss, nn.modules.loss._Loss):
        raise OptionError(
            f"loss={loss!r}: must be a function of the model and a micro-batch, {_SUCH_AS}, or "
            "wb.Coupled"
        )
    else:
        _refuse_other_arguments(loss)
    if units is not None and not callable(units):
        raise OptionError(f"units={units!r}: must be a function")


def _refuse_other_arguments(loss: Callable[..., Any]) -> None:
    """Refuse a function that cannot be called with the model and a micro-batch."""
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # a function of C without a signature
        return
    try:
        signature.bind(None, None)
        is_of_torch = getattr(loss, "__module__", None) == "torch.nn.functional"
        takes_both = loss is not cross_entropy and not is_of_torch  # which take logits
    except TypeError:
        takes_both = False
    if not takes_both:
        raise OptionError(
            f"WholeBatch calls loss(model, micro), and {getattr(loss, '__name__', loss)!s} takes "
            f"({', '.join(signature.parameters)}): give a function of the model and a micro-batch, "
            f"{_SUCH_AS}"
        )


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
