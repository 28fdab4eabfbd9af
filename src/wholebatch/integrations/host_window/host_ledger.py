"""The ledger of a window in a loop that is somebody else's.

A trainer of another library makes the forwards, the backwards and the step, and clips and logs in
between. What is left to us is the scale. A hook on the loss multiplies the gradient that enters the
graph by one seed for the window and all ranks (times the units, where the loss is a mean), so that
after the last backward the gradients are

    seed / (host's divisors) × sum over micro-batches and ranks of d(total)

and `settle` multiplies them by the one number that makes this the gradient of the undivided global
batch. Whatever the trainer does with gradients comes after that and sees the right ones.

The laws of every adapter are here, once: a window begins without gradients, nobody touches it while
it is open, every loss that was weighed had its backward, announced units are those that came, what
is not finite makes no update, and 16-bit gradients are added in fp32.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.compile import Execute
from wholebatch.core.close import (
    CloseOptions,
    Holder,
    Policy,
    first_nonfinite,
    first_seed,
    power_of_two_near,
    read_scalars,
    read_units,
    scalar_on,
    where_nonfinite,
)
from wholebatch.core.compiled_loss import AddedLoss, CompiledLoss, CompilesLosses, Pending
from wholebatch.core.gradient_store import Store
from wholebatch.core.loss import SINGLE, Loss, Terms, Units, check_units
from wholebatch.core.splitting.samples import readable_layout
from wholebatch.core.window import backward_into
from wholebatch.coupled import choose as choose_batchnorm
from wholebatch.coupled.adds_up import LookResult, check_adds_up
from wholebatch.coupled.audit import audit as audit_of
from wholebatch.coupled.batchnorm.policies import Refuse, Statistics
from wholebatch.coupled.contrastive.losses import refuse_in_parts
from wholebatch.coupled.local_collectives import local_collectives
from wholebatch.coupled.stream_look import StreamLook
from wholebatch.distributed import Single
from wholebatch.distributed.fsdp import check_dtypes
from wholebatch.distributed.process_group import Group
from wholebatch.errors import (
    EmptyWindowError,
    LossError,
    NonFiniteError,
    OptionError,
    StateError,
    UnsupportedError,
    WindowError,
)
from wholebatch.integrations.host_window.host_gradients import (
    GradientsIn,
    HostGradients,
    RankGroup,
    all_finite,
    multiply,
)

__all__ = [
    "AdapterOptions",
    "FirstLook",
    "HostLedger",
    "HostLoss",
    "LoopWindows",
    "Settled",
    "attributes_restored",
    "refuse_shared_batches",
    "replaced_attributes",
]


_log = logging.getLogger("wholebatch")


@dataclass(frozen=True)
class AdapterOptions:
    """The options that every adapter over torch takes; impossible values are refused here."""

    batchnorm: str = "refuse"
    zero_units: Policy = "raise"
    nonfinite: Policy = "raise"
    audit: bool = True

    def __post_init__(self) -> None:
        CloseOptions(nonfinite=self.nonfinite, zero_units=self.zero_units).check(())
        if self.batchnorm == "exact":
            raise OptionError(
                'batchnorm="exact" in the loop of another library: exact BatchNorm runs the '
                "forwards of a window in lock-step, and they are not ours; use wb.WholeBatch, or "
                "name another policy"
            )


@dataclass(frozen=True)
class HostLoss:
    """The loss of one micro-batch, as the host computed it: a sum or a mean over its units.

    >>> weight = torch.ones((), requires_grad=True)
    >>> HostLoss.of(weight * 6, units=3).total.item()
    6.0
    >>> HostLoss.of(mean=weight * 2, units=3).total.item()
    6.0
    """

    loss: Tensor
    units: Units
    is_mean: bool

    @classmethod
    def of(
        cls,
        total: Tensor | Loss | Terms | None = None,
        units: Units | None = None,
        mean: Tensor | None = None,
        *,
        audit: bool = True,
    ) -> HostLoss:
        """Return the loss that `backward(total, units=)` or `backward(mean=, units=)` was given."""
        if (total is None) == (mean is None):
            raise LossError(
                f"backward() with {'neither' if total is None else 'both'} of total and mean=: "
                "give the sum as backward(total, units=...), or the mean as "
                "backward(mean=..., units=...)"
            )
        if isinstance(total, Terms):
            raise LossError(
                f"a loss of several terms ({', '.join(total.by_name)}) in a stream: each is "
                "divided by its own total over the window, which must be known before the first "
                "backward; use wb.WholeBatch with units="
            )
        if isinstance(total, Loss):
            if units is not None:
                raise LossError("units= beside a wb.Loss, which carries its own: give one")
            if audit:
                refuse_in_parts(total)
            units, total = total.units, total.total
        if units is None:
            raise LossError(
                "backward() without units=: say what the loss is a sum or a mean over "
                "(units=samples, tokens or weights), or pass a wb.Loss"
            )
        loss = _check_loss(total if mean is None else mean)
        return cls(loss, check_units(units), is_mean=mean is not None)

    @property
    def weight(self) -> Units:
        """The factor that makes the loss a sum; a tensor in float64."""
        if not self.is_mean:
            return 1.0
        return self.units.double() if isinstance(self.units, Tensor) else self.units

    @property
    def total(self) -> Tensor | float:
        """The sum, detached; a mean over no units (0/0) adds nothing."""
        value = self.loss.detach().reshape(())
        if value.dtype in (torch.float16, torch.bfloat16):
            value = value.float()  # times 10,000 is beyond fp16, and 1001 is 1000 in bf16
        units = self.units
        if not self.is_mean:
            return value
        if isinstance(units, Tensor):
            units = units.to(value.device)
            # Not 0.0: where() would copy it from the host, and wait for the device.
            return torch.where(units == 0, value.new_zeros(()), value * units)
        return value * units if units else 0.0


def _check_loss(loss: object) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise LossError(
            f"loss {what}: must be one number, the sum or the mean over the micro-batch's units"
        )
    if not loss.requires_grad:
        raise LossError(
            "the loss does not require a gradient: it is detached from the model, was computed "
            "under torch.no_grad(), or every parameter that it depends on is frozen"
        )
    return loss


@dataclass(frozen=True)
class Settled:
    """A completed window: its exact mean loss over all units of all ranks."""

    loss: float
    units: float
    micro_batches: int


@dataclass
class _OpenWindow:
    """The losses that were weighed, and how many of their backwards were made."""

    seed: float | None = None
    divided_by: float = 1.0
    totals: list[Tensor | float] = field(default_factory=list)
    units: list[Units] = field(default_factory=list)
    micro_batches: int = 0
    backwards: int = 0
    broken: bool = False
    reduced: bool = True  # True if the engine reduced in the last backward
    compiled: bool = False  # True if a compiled loss function made the last micro-step

    def weighing(self, weight: Units) -> Callable[[Tensor], Tensor]:
        """Return the hook on a loss that multiplies the gradient its backward begins with."""

        def weigh(gradient: Tensor) -> Tensor:
            self.backwards += 1
            if isinstance(weight, Tensor):
                return gradient * weight.to(gradient.device, gradient.dtype)
            return gradient * weight

        return weigh

    def saved(self) -> dict[str, Any]:
        """Return the window as numbers."""
        return {
            "micro_batches": self.micro_batches,
            "seed": self.seed,
            "divided_by": self.divided_by,
            "totals": read_scalars(self.totals),
            "units": read_scalars(self.units),
        }

    @classmethod
    def loaded(cls, saved: Any) -> _OpenWindow:
        """Return the window of `saved`, ready for its next micro-batch."""
        if not isinstance(saved, dict) or "micro_batches" not in saved:
            raise StateError("this is not the state of a window (it has no 'micro_batches')")
        names = ("micro_batches", "seed", "divided_by", "totals", "units")
        return cls(**{name: saved[name] for name in names}, backwards=saved["micro_batches"])


class HostLedger:
    """The ledger of windows whose backwards and updates a host makes.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(()))
    >>> ledger = HostLedger([], [torch.optim.SGD([weight], lr=0.1)], device=torch.device("cpu"))
    >>> for samples in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([8.0])):
    ...     mean = (weight * samples).mean()
    ...     ledger.weigh(HostLoss.of(mean=mean, units=len(samples)))
    ...     with ledger.backward():
    ...         mean.backward()                          # the host's
    >>> settled = ledger.settle()
    >>> weight.grad.item(), settled.loss, settled.units
    (3.5, 3.5, 4.0)

    `gradients` says where the host keeps them within a window. `owns_forward`: the adapter calls
    the forward itself, so that it looks at it by a `FirstLook`. `scaled_by` has the host's
    GradScaler as its attribute `scaler`, if there is one. `divided_by()` is what the host itself
    divides a loss by on the way (its number of micro-batches), to be undone. Backwards of ours run
    within `inside()`.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        device: torch.device,
        options: AdapterOptions | None = None,
        gradients: GradientsIn = "whole",
        owns_forward: bool = False,
        scaled_by: object = None,
        divided_by: Callable[[], float] = lambda: 1.0,
        inside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.options = options or AdapterOptions()
        self.group = _group_on(device)
        self.updates = 0
        self.skipped = 0
        self.last: Settled | None = None
        self._device, self._scaled_by, self._divided_by = device, scaled_by, divided_by
        self._inside = inside
        reduce = self.group.sum_tensor if self.group.ranks > 1 else None
        self._batchnorms = [
            choose_batchnorm(self.options.batchnorm, model, reduce=reduce) for model in models
        ]
        self._models = models
        modules = [module for model in models for module in model.modules()]
        self._replicas = [one for one in modules if isinstance(one, DistributedDataParallel)]
        self._look = StreamLook(models, audit=self.options.audit, policies=self._batchnorms)
        # An engine that shards has collectives in its forwards and backwards.
        self.may_look = gradients == "whole" and self.options.audit
        if gradients == "sharded":
            for model in models:
                check_dtypes(model)
        if gradients == "whole" and not owns_forward:
            self._warn_of_plain_model()
            self._look.watch()
        _warn_of_spectral_norm(models)
        self.gradients = HostGradients(models, optimizers, gradients)
        self._next_seed: float | None = None
        self._open = _OpenWindow()
        self.pending = Pending()
        self._seeds: dict[torch.dtype, Tensor] = {}

    def _warn_of_plain_model(self) -> None:
        if self.group.ranks > 1 and not self._replicas:
            _log.warning(
                "a plain model in a job of %d ranks: nothing reduces its gradients, and each rank "
                "trains a model of its own. Pass the model that accelerator.prepare() or "
                "fabric.setup() returned",
                self.group.ranks,
            )

    @property
    def micro_batches(self) -> int:
        """Micro-batches that the open window holds."""
        return self._open.micro_batches

    @property
    def is_open(self) -> bool:
        """True if micro-batches were weighed, or added, that are not settled yet."""
        return self.micro_batches > 0 or self._open.backwards > 0

    @property
    def _is_scaled(self) -> bool:
        scaler = getattr(self._scaled_by, "scaler", None)
        return scaler is not None and bool(scaler.is_enabled())

    # -------------------------------------------------------------------- add

    def weigh(self, given: HostLoss, *, is_last: bool = False) -> None:
        """Give this micro-batch's loss its weight; the host's backward of it comes next.

        `is_last`: it is known to be the window's last.
        """
        seed = self._seed(given.units)
        weight = given.weight * seed * self._open.divided_by
        self.enter(given, given.loss, weight, is_last=is_last)

    def _seed(self, units: Units) -> float:
        """Return the seed of the window, which its first loss may have to choose."""
        window, divided_by = self._open, self._divided_by()
        if window.seed is None:
            seed = self._next_seed or first_seed(float(units), self.group, self._device)
            window.seed, window.divided_by = float(seed), divided_by
        elif divided_by != window.divided_by:
            raise WindowError(
                f"the window's first loss was divided by {window.divided_by:g}, this one is by "
                f"{divided_by:g}: change the number of micro-batches between windows"
            )
        return window.seed

    def enter(
        self, given: HostLoss, flowing: Tensor, weight: Units = 1.0, *, is_last: bool = False
    ) -> None:
        """Enter a loss into the ledger; its backward, which starts at `flowing`, comes next."""
        window = self._open
        self.pending.refuse()
        self._begin_loss(given, is_whole=is_last and not self.is_open and self.group.ranks == 1)
        flowing.register_hook(window.weighing(weight))
        window.totals.append(given.total)
        window.units.append(given.units)
        self._count_micro_batch()

    def _begin_loss(self, given: HostLoss, *, is_whole: bool = False) -> None:
        """Refuse a loss that does not belong into this window."""
        self._refuse_broken()
        loss = {"mean" if given.is_mean else "total": given.loss}
        self._look.at_backward(**loss, units=given.units, in_parts=not is_whole)
        if not self.is_open:
            for policy in self._batchnorms:
                if isinstance(policy, Refuse):  # others have recorded the first forward already
                    policy.begin_window()

    def _refuse_broken(self) -> None:
        if self._open.broken:
            raise WindowError(
                "the last backward of this window failed half way and left part of its gradients "
                "behind: call discard() and optimizer.zero_grad() before going on"
            )

    def _count_micro_batch(self) -> None:
        self._open.micro_batches += 1
        for policy in self._batchnorms:
            policy.micro()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run the host's backward of the loss that was weighed within this context."""
        self.before_backward()
        try:
            yield
        except BaseException:
            self._open.broken = True  # some gradients of this micro-batch are in, others are not
            raise
        self.after_backward()

    def before_backward(self) -> None:
        """Refuse gradients that were there before the window, or that others have changed."""
        if self._open.backwards:
            self.gradients.check(self.micro_batches)
            return
        try:
            self.gradients.begin()
        except WindowError:
            self.discard()
            raise

    def after_backward(self) -> None:
        """Note how the host's backward leaves the gradients."""
        self.gradients.add()
        self._look.done()
        self._open.compiled = False
        self._open.reduced = all(one.require_backward_grad_sync for one in self._replicas)

    # ------------------------------------------------- compiled loss functions

    def compile(
        self,
        loss: Callable[..., Any],
        execute: Execute,
        reads: Callable[..., Any] | None = None,
    ) -> CompiledLoss:
        """Return the loss function as one that adds the gradient of its micro-batch itself."""
        self.gradients.wide = self.group.ranks == 1
        return CompiledLoss(
            loss,
            door=self,
            window=self,
            models=self._models,
            device=self._device,
            execute=execute,
            keeps_moments=any(isinstance(one, Statistics) for one in self._batchnorms),
            adds=False,
            reads=reads,
        )

    @contextmanager
    def micro_step(self) -> Iterator[bool]:
        """Make room for a micro-step of a compiled loss function (this is a `Door` of it)."""
        self.pending.refuse()
        self._refuse_broken()
        self.before_backward()
        with ExitStack() as stack:
            stack.enter_context(self._inside())
            for one in self._replicas:
                stack.enter_context(one.no_sync())  # a graph does not reduce: `settle` does
            yield not self._look.active
        self.gradients.add()
        self._look.done()
        self._open.reduced, self._open.compiled = self.group.ranks == 1, True

    def add_eagerly(self, loss: Loss | Terms) -> None:
        """Make the backward of a compiled function's loss by eager code."""
        given = HostLoss.of(loss, audit=self.options.audit)
        total = given.loss
        self._begin_loss(given)
        self._seed(given.units)
        into = backward_into(self.inputs, self._models, [total])
        try:
            into.run([total], [self.seed_of(SINGLE, total, 1.0)])
        except BaseException:
            self._open.broken = True
            raise
        self.record({SINGLE: total.detach()}, {SINGLE: given.units}, {SINGLE: 1.0})

    def mark_broken(self) -> None:
        """Let the window be discarded: a compiled function failed and may have added gradients."""
        self._open.broken = True

    def take(self, loss: AddedLoss) -> None:
        """Enter the loss of a compiled function, whose gradient is in the window."""
        self.pending.take(loss, self)
        self._count_micro_batch()

    # The window as graphs see it (`compile.Ledger`).

    known = None
    lends_buffers = False

    @property
    def broken(self) -> bool:
        """True if a backward of the open window failed half way."""
        return self._open.broken

    @property
    def inputs(self) -> list[nn.Parameter]:
        """The parameters that the open window trains."""
        return self.gradients.trained

    @property
    def entered(self) -> int:
        """Losses that the open window has recorded."""
        return len(self._open.totals)

    @property
    def only_eager(self) -> str | None:
        """The reason why micro-steps can only run by eager code; None where there is none."""
        if self.gradients.kept != "whole":
            return "this engine's collectives run in its forwards and backwards, by eager code"
        if self.group.ranks > 1 and self.gradients.has_sixteen_bit:
            return "16-bit parameters on several ranks, whose gradients DDP reduces in 16 bit"
        return None

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizers train now."""
        return self.gradients.find_trained()

    def open_early(self) -> bool:
        """Choose the seed of the window if it is known without a loss."""
        if self._open.seed is None and self._next_seed is not None:
            self._seed(1)
        return self._open.seed is not None

    def seed_of(self, name: str, total: Tensor, weight: float) -> Tensor:
        """Return the number that the backward of a total starts from."""
        assert self._open.seed is not None
        if total.dtype not in self._seeds:
            seed = scalar_on(total.device, self._open.seed, total.dtype)
            if self._is_scaled:
                seed = getattr(self._scaled_by, "scaler").scale(seed).to(total.dtype)  # noqa: B009
            self._seeds[total.dtype] = seed
        return self._seeds[total.dtype]

    def record(
        self,
        totals: Mapping[str, Tensor],
        units: Mapping[str, Units],
        weights: Mapping[str, float],
    ) -> None:
        """Record a micro-step whose gradients are added."""
        self._open.totals.append(totals[SINGLE])
        self._open.units.append(units[SINGLE])
        self._open.backwards += 1

    # ----------------------------------------------------------------- settle

    def settle(
        self,
        holders: Iterable[Holder] | None = None,
        *,
        averaged_by: float = 1.0,
        announced: float | None = None,
    ) -> Settled | None:
        """Bring the window's reduced gradients to those of the undivided global batch.

        `holders` are the host's own, if not the parameters hold the gradients. `averaged_by` is
        what the host divided them by when it reduced them over the ranks. `announced`: the units of
        all ranks, where the host had counted them before and scaled by them; they must be those
        that came. Return None where the window makes no update (`zero_units="skip"`,
        `nonfinite="skip"`): no gradient is left, so that the host's step changes nothing. After an
        error none is left either.
        """
        if not self.is_open:
            raise WindowError("settle() without a micro-batch: no backward was weighed")
        self.pending.refuse()
        try:
            return self._settle(holders, averaged_by, announced)
        except BaseException:
            self.discard()
            if holders is None:
                _clear(self.gradients.holders())
            raise

    def _settle(
        self, holders: Iterable[Holder] | None, averaged_by: float, announced: float | None
    ) -> Settled | None:
        window = self._open
        self._check_complete()
        if not window.reduced:
            self.gradients.reduce(self.group, averaged_by)
        self.gradients.finish(self.group, averaged_by)
        held = self.gradients.holders() if holders is None else list(holders)
        totals = read_scalars(window.totals)
        total, units, spoiled = self.group.sum(
            [math.fsum(totals), read_units(window.units), float(not all_finite(held))]
        )
        if announced is not None and not math.isclose(announced, units, rel_tol=1e-6):
            raise LossError(
                f"{announced:g} units were announced for this window, on all processes, and its "
                f"micro-batches brought {units:g}: both must be counted on the same thing, so "
                "count units on what the loss is given"
            )
        losses_finite = math.isfinite(total)
        finite = losses_finite and not spoiled
        if units == 0.0:
            self._refuse_no_units()
            self._skip(held)
            return None
        # Gradients that only the loss scale spoiled are left to the host's scaler, which skips.
        if not finite and not (losses_finite and self._is_scaled):
            self._refuse_nonfinite(totals, losses=not losses_finite)
            self._skip(held)
            return None
        if announced is None:
            assert window.seed is not None
            multiply(held, averaged_by / (units * window.seed))
        self.gradients.round_once()
        for policy in self._batchnorms:
            policy.end_window() if finite else policy.discard_window()
        self._next_seed = power_of_two_near(1.0 / units)
        self.updates += 1
        self.gradients.unused = True
        self.last = Settled(total / units, units, window.micro_batches)
        self._forget()
        return self.last

    def _check_complete(self) -> None:
        """Refuse gradients that others changed, a loss without its backward, and a held sync."""
        window, ranks = self._open, self.group.ranks
        if window.micro_batches > 1 or ranks > 1:
            self._look.end_window(window.micro_batches)
        if not self._is_scaled:  # a scaler may have unscaled the gradients already
            self.gradients.check(window.micro_batches)
        if self.gradients.kept != "elsewhere" and window.backwards != window.micro_batches:
            raise WindowError(
                f"{window.micro_batches} losses were weighed in this window, and "
                f"{window.backwards} backwards came: every loss needs its one backward, so that "
                "its units are counted with its gradient"
            )
        if ranks > 1 and not window.reduced and not window.compiled:
            raise WindowError(
                "the last backward of this window did not reduce the gradients over the "
                f"{ranks} processes: the last micro-batch must make its backward, outside of "
                "no_sync (units=0 for one that does not count)"
            )

    def _refuse_no_units(self) -> None:
        if self.options.zero_units == "raise":
            raise EmptyWindowError(
                f"all {self.micro_batches} micro-batches of this window have zero units "
                "(every label is ignored or every weight is zero), so its mean does not exist: "
                "filter such batches, or pass zero_units='skip' to make no update from them"
            )

    def _refuse_nonfinite(self, totals: Sequence[float], *, losses: bool) -> None:
        if self.options.nonfinite == "skip" and not self._is_scaled:
            return
        culprit = first_nonfinite({"": totals}, range(len(totals)))
        rank = self.group.rank if self.group.ranks > 1 else None
        where = where_nonfinite(culprit, self.micro_batches, rank=rank, losses=losses, own=True)
        raise NonFiniteError(
            f"update {self.updates + 1}: {where}. Nothing was updated: {Store.after_failure}",
            micro_batch=culprit,
        )

    def _skip(self, held: Sequence[Holder]) -> None:
        """Make no update: leave the host's step nothing to work on."""
        self.discard()
        if self._is_scaled:  # a scaler wants gradients to look at
            multiply(held, 0.0)
        else:
            _clear(held)
        self.skipped += 1
        self.last = None

    def discard(self) -> None:
        """Forget the open window; clearing the gradients is the host's."""
        self._forget()
        for policy in self._batchnorms:
            policy.discard_window()

    def _forget(self) -> None:
        self._open = _OpenWindow()
        self.pending.forget()
        self._seeds.clear()
        self.gradients.forget()

    def detach(self) -> None:
        """Leave the models as they were found (a conversion of BatchNorm is kept)."""
        self._look.end_window()
        for policy in self._batchnorms:
            policy.detach()

    # ----------------------------------------------------------------- state

    def state_dict(self, parameters: Sequence[nn.Parameter] | None = None) -> dict[str, Any]:
        """Return the window; with `parameters`, their gradients too, of all ranks together.

        A checkpoint is one file, and every rank holds gradients of its own until the last
        backward. Their sum, given to one rank on the way back, leads to the same update: call it
        on all ranks. Without `parameters` the gradients are the host's to keep.
        """
        self.pending.refuse()
        saved = {
            "updates": self.updates,
            "next_seed": self._next_seed,
            "batchnorms": [policy.state_dict() for policy in self._batchnorms],
            **self._open.saved(),
        }
        if parameters is not None and self.is_open:
            total, units = self.group.sum([math.fsum(saved["totals"]), math.fsum(saved["units"])])
            saved.update(totals=[total], units=[units])
            saved["gradients"] = self.gradients.held_by_all(parameters, self.group)
        return saved

    def load_state_dict(
        self, saved: dict[str, Any], parameters: Sequence[nn.Parameter] | None = None
    ) -> None:
        """Go on with that window; without `parameters`, its gradients must be back in place."""
        window = _OpenWindow.loaded(saved)
        self._forget()
        self._open = window
        self.updates, self._next_seed = saved["updates"], saved["next_seed"]
        for policy, state in zip(self._batchnorms, saved["batchnorms"], strict=True):
            policy.load_state_dict(state)
        if "gradients" not in saved:
            return
        if parameters is None or len(parameters) != len(saved["gradients"]):
            have = "no" if parameters is None else len(parameters)
            raise StateError(
                f"the state has gradients of {len(saved['gradients'])} parameters, and there are "
                f"{have} parameters here: load it with the model that saved it"
            )
        if self.group.rank != 0:  # the first rank has them all
            window.totals, window.units = [0.0], [0.0]
            return
        self.gradients.put_back(parameters, saved["gradients"])


def _warn_of_spectral_norm(models: Iterable[nn.Module]) -> None:
    for finding in (found for model in models for found in audit_of(model).findings):
        if finding.kind == "spectral":
            _log.warning("%s", finding)


def _group_on(device: torch.device) -> RankGroup:
    """Return all processes of torch.distributed, or this one alone where it is not in use."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return Single()
    return Group([None], device, rank=dist.get_rank())


def _clear(holders: Iterable[Holder]) -> None:
    """Leave no gradient: a step of torch's optimizers then changes neither weights nor state."""
    for holder in holders:
        holder.grad = None


class LoopWindows(CompilesLosses):
    """The base of adapters whose user writes the loop (Accelerate's, Fabric's).

    `engine` names what keeps gradients within a window where they are not whole; `save_when` and
    `step_after` say what to do in errors.
    """

    def __init__(
        self,
        window: HostLedger,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        engine: object,
        save_when: str,
        step_after: str,
    ) -> None:
        self._window, self._engine_kind = window, engine
        self._save_when, self._step_after = save_when, step_after
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._refuse_open_window)

    def compiled(self, loss: Callable[..., Any], execute: Execute) -> CompiledLoss:
        """Return a compiled loss function of these windows."""
        return self._window.compile(loss, execute)

    def _refuse_open_window(self, *_: Any) -> None:
        if self._window.is_open:
            raise WindowError(f"optimizer.step() while the window is open: {self._step_after}")

    @property
    def updates(self) -> int:
        """Windows that were completed so far."""
        return self._window.updates

    @property
    def last(self) -> Settled | None:
        """The window that was completed last."""
        return self._window.last

    @property
    def skipped(self) -> int:
        """Windows that made no update (not finite, or without units)."""
        return self._window.skipped

    def discard(self) -> None:
        """Forget the open window, after an error; `optimizer.zero_grad()` is the loop's."""
        self._window.discard()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the library's own checkpoints; an open window is kept whole.

        Its gradients, which those checkpoints leave out, are added over the processes.
        """
        window = self._window
        if window.is_open and window.gradients.kept != "whole":
            raise WindowError(
                f"the window is open with {window.micro_batches} micro-batches, and its "
                f"gradients are inside {self._engine_kind}: save {self._save_when}"
            )
        return window.state_dict(window.gradients.holders())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the window that `state_dict` has saved."""
        self._window.load_state_dict(state, self._window.gradients.holders())


def refuse_shared_batches(accelerator: Any, host: str) -> None:
    """Refuse an Accelerator whose ranks share batches, so that units would be counted twice."""
    parallel = getattr(accelerator, "parallelism_config", None)
    for name in ("tp", "cp", "sp"):
        if parallel is not None and getattr(parallel, f"{name}_size", 1) > 1:
            raise UnsupportedError(
                f"{host} with {name}_size={getattr(parallel, f'{name}_size')}: units would be "
                "counted more than once over ranks that share a batch; use data parallelism alone"
            )


_MOST_TRIES = 8
_LARGEST_CONTAINER = 1000


class FirstLook:
    """Looks once whether the loss of a host's micro-batches adds up (`coupled.adds_up`).

    A run of the loss may change attributes of `host`, beside the model's. Numbers among them, and
    small containers (a trainer's metrics), are put back.
    """

    def __init__(self, model: nn.Module, window: HostLedger, *, host: object, off: str) -> None:
        self._model, self._window, self._host, self._off = model, window, host, off
        self._tries = _MOST_TRIES if window.may_look else 0

    @property
    def pending(self) -> bool:
        """True if the look is still to come."""
        return self._tries > 0 and not self._window.is_open

    def at(self, run: Callable[[Any], Loss], batch: Any, *, micro_batch: int | None = None) -> None:
        """Refuse a loss that does not add up, on the first samples of `batch`, on all ranks.

        Samples without units tell nothing; one process then looks at the next window's first.
        """
        group, made = self._window.group, LookResult()
        with attributes_restored(self._host), local_collectives():
            try:
                layout = readable_layout(batch, None, ())
                made = check_adds_up(
                    self._model, run, layout, micro_batch=micro_batch, name="the loss"
                )
            except Exception as error:  # most often the loss's own, and the training will raise it
                _log.warning("no look whether micro-batches add up to the whole batch: %r", error)
        self._window.discard()  # what BatchNorm policies have recorded of the runs
        self._tries = self._tries - 1 if group.ranks == 1 and not made.conclusive else 0
        made.refuse(self._off, on_another_rank=bool(group.sum([float(len(made.findings))])[0]))


@contextmanager
def attributes_restored(host: object) -> Iterator[None]:
    """Put back the attributes of an object, and the contents of small containers among them."""
    found: list[tuple[Any, Any]] = []
    _copy_containers(vars(host), found)
    try:
        yield
    finally:
        for container, before in found:
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(before)


def _copy_containers(value: Any, found: list[tuple[Any, Any]]) -> None:
    """Append a small container, and those inside it, each with a copy."""
    if type(value) not in (dict, defaultdict, list, set, deque) or len(value) > _LARGEST_CONTAINER:
        return
    if any(value is container for container, _ in found):
        return
    found.append((value, copy.copy(value)))
    for one in value.values() if isinstance(value, dict) else value:
        _copy_containers(one, found)


@contextmanager
def replaced_attributes(owner: object, **attributes: Any) -> Iterator[None]:
    """Set attributes of this one object within the context; then restore those that it had."""
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            own.pop(name, None)
        own.update(before)
