"""What every adapter over torch lets its user choose, with the same words.

One meaning per word: `total` is a sum, `mean` is a mean, in every loop over micro-batches.

What is known of a host's open window, and how it is written down.

A window in a loop that is somebody else's.

A trainer of another library makes the forwards, the backwards and the step, and clips and logs in
between. What is left to us is the scale. A hook on the loss multiplies what flows into the graph by
one seed for the window and all ranks (times the units, where the loss is a mean), so that after the
last backward the gradients are

    seed / (host's divisors) × sum over micro-batches and ranks of d(total)

and `settle` multiplies them by the one number that makes this the gradient of the undivided global
batch. Whatever the trainer does with gradients comes after that and sees the right ones.

The laws of every adapter are here, once: a window begins clean, nobody touches it while it is open,
every loss that was weighed had its backward, announced units are those that came, what is not
finite makes no update, and 16-bit gradients are added in fp32.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.core.close import (
    Holder,
    Policy,
    first_nonfinite,
    power_of_two_near,
    read_scalars,
    read_units,
    where_nonfinite,
)
from wholebatch.core.loss import Loss, Terms, Units, check_units
from wholebatch.coupled import choose as choose_batchnorm
from wholebatch.coupled.audit import audit as audit_of
from wholebatch.coupled.batchnorm.policies import Refuse
from wholebatch.coupled.contrastive.losses import refuse_in_parts
from wholebatch.coupled.stream_look import StreamLook
from wholebatch.distributed.fsdp import check_dtypes
from wholebatch.errors import (
    EmptyWindowError,
    LossError,
    NonFiniteError,
    OptionError,
    StateError,
    WindowError,
)
from wholebatch.integrations.host_window.host_gradients import (
    Clean,
    Gradients,
    Ranks,
    WideSums,
    all_finite,
    all_parameters,
    clear,
    multiply,
    ranks_of,
    summed,
)
from wholebatch.offload import Store

__all__ = ["Books", "Given", "Hosted", "Options", "Settled"]


@dataclass(frozen=True)
class Options:
    """How a host's windows are kept; impossible values are refused here, at construction."""

    batchnorm: str = "refuse"
    zero_units: Policy = "raise"
    nonfinite: Policy = "raise"
    audit: bool = True

    def __post_init__(self) -> None:
        for name in ("zero_units", "nonfinite"):
            if getattr(self, name) not in ("raise", "skip"):
                raise OptionError(f"{name}={getattr(self, name)!r}: must be 'raise' or 'skip'")
        if self.batchnorm == "exact":
            raise OptionError(
                'batchnorm="exact" in the loop of another library: exact BatchNorm runs the '
                "forwards of a window in lock-step, and they are not ours; use wb.WholeBatch, or "
                "name another policy"
            )


@dataclass(frozen=True)
class Given:
    """The loss of one micro-batch: where its backward begins, its units, and what it is of them.

    >>> weight = torch.ones((), requires_grad=True)
    >>> Given.of(weight * 6, units=3).total.item()
    6.0
    >>> Given.of(mean=weight * 2, units=3).total.item()
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
    ) -> Given:
        """Return what `backward(total, units=)` or `backward(mean=, units=)` was given."""
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
            return cls(_checked(total.total), check_units(total.units), is_mean=False)
        if units is None:
            raise LossError(
                "backward() without units=: say what the loss is a sum or a mean over "
                "(units=samples, tokens or weights), or pass a wb.Loss"
            )
        if mean is not None:
            return cls(_checked(mean), check_units(units), is_mean=True)
        return cls(_checked(total), check_units(units), is_mean=False)

    @property
    def as_written(self) -> dict[str, Any]:
        """The words that it was given with."""
        return {"mean" if self.is_mean else "total": self.loss, "units": self.units}

    @property
    def weight(self) -> Units:
        """What the loss is to be multiplied by to be a sum; a tensor in float64."""
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


def _checked(loss: object) -> Tensor:
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
    """What a window was: its exact mean loss over all units of all ranks."""

    loss: float
    units: float
    micro_batches: int


@dataclass
class Books:
    """The losses that were weighed, and how far their backwards have come."""

    seed: float = 1.0
    divided_by: float = 1.0
    totals: list[Tensor | float] = field(default_factory=list)
    units: list[Units] = field(default_factory=list)
    micro_batches: int = 0
    flowed: int = 0  # losses whose backward came
    begun: bool = False  # whether the first backward was let through
    broken: bool = False
    reduced: bool = True  # whether the engine reduced in the last backward

    def weighing(self, weight: Units) -> Callable[[Tensor], Tensor]:
        """Return the hook of a loss that multiplies what its backward begins with."""

        def weigh(gradient: Tensor) -> Tensor:
            self.flowed += 1
            if isinstance(weight, Tensor):
                return gradient * weight.to(gradient.device, gradient.dtype)
            return gradient * weight

        return weigh

    def check_complete(self, ranks: int, *, in_grad: bool) -> None:
        """Refuse a loss without its backward, and gradients that were not reduced."""
        if in_grad and self.flowed != self.micro_batches:
            raise WindowError(
                f"{self.micro_batches} losses were weighed in this window, and {self.flowed} "
                "backwards came: every loss needs its one backward, so that its units are counted "
                "with its gradient"
            )
        if ranks > 1 and not self.reduced:
            raise WindowError(
                "the last backward of this window did not reduce the gradients over the "
                f"{ranks} processes: the last micro-batch must make its backward, outside of "
                "no_sync (units=0 for one that does not count)"
            )

    def saved(self) -> dict[str, Any]:
        """Return them as numbers."""
        return {
            "micro_batches": self.micro_batches,
            "seed": self.seed,
            "divided_by": self.divided_by,
            "totals": read_scalars(self.totals),
            "units": read_scalars(self.units),
        }

    @classmethod
    def loaded(cls, saved: Any) -> Books:
        """Return the books that `saved` wrote down, ready for the next micro-batch."""
        if not isinstance(saved, dict) or "micro_batches" not in saved:
            raise StateError("this is not the state of a window (it has no 'micro_batches')")
        count = saved["micro_batches"]
        return cls(
            seed=saved["seed"],
            divided_by=saved["divided_by"],
            totals=list(saved["totals"]),
            units=list(saved["units"]),
            micro_batches=count,
            flowed=count,
            begun=count > 0,
        )


_log = logging.getLogger("wholebatch")


class Hosted:
    """The ledger of a window whose backwards and update a host makes.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(()))
    >>> window = Hosted([], [torch.optim.SGD([weight], lr=0.1)], device=torch.device("cpu"))
    >>> for samples in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([8.0])):
    ...     mean = (weight * samples).mean()
    ...     window.weigh(Given.of(mean=mean, units=len(samples)))
    ...     with window.backward():
    ...         mean.backward()                          # the host's
    >>> settled = window.settle()
    >>> weight.grad.item(), settled.loss, settled.units
    (3.5, 3.5, 4.0)
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        device: torch.device,
        options: Options | None = None,
        ranks: Ranks | None = None,
        gradients: Gradients = "whole",
        owns_forward: bool = False,
        is_scaled: Callable[[], bool] = lambda: False,
    ) -> None:
        self.options = options or Options()
        self.ranks = ranks_of(device) if ranks is None else ranks
        self.updates = 0
        self.skipped = 0
        self.last: Settled | None = None
        self._models, self._optimizers = list(models), list(optimizers)
        self._device = device
        self._in_grad = gradients != "elsewhere"
        self._keeps = gradients == "whole"
        self._is_scaled = is_scaled
        reduce = self.ranks.sum_tensor if self.ranks.size > 1 else None
        if gradients == "sharded":
            for model in models:
                check_dtypes(model)
        self._batchnorms = [
            choose_batchnorm(self.options.batchnorm, model, reduce=reduce) for model in models
        ]
        for finding in (found for model in models for found in audit_of(model).findings):
            if finding.kind == "spectral":
                _log.warning("%s", finding)
        self._replicas = [
            module
            for model in models
            for module in model.modules()
            if isinstance(module, DistributedDataParallel)
        ]
        self.sums = WideSums(optimizers if self._keeps else [])
        self._look = StreamLook(self._models, audit=self.options.audit, policies=self._batchnorms)
        # An engine that shards has collectives in its forwards and backwards.
        self.may_look = self._keeps and self.options.audit
        if self._keeps and not owns_forward:
            self._look.watch()
        self._clean = Clean(self._models, self._optimizers)
        self._next_seed: float | None = None
        self._clear()

    def _clear(self) -> None:
        self._books = Books()
        self._clean.forget()
        self.sums.clear()

    @property
    def micro_batches(self) -> int:
        """Micro-batches that the open window holds."""
        return self._books.micro_batches

    @property
    def is_open(self) -> bool:
        """Whether micro-batches were weighed that are not settled yet."""
        return self.micro_batches > 0

    # -------------------------------------------------------------------- add

    def weigh(self, given: Given, *, divided_by: float = 1.0, is_last: bool = False) -> None:
        """Give this micro-batch's loss its weight; the host's backward of it comes next.

        `divided_by` is what the host itself divides the loss by on the way (its number of
        micro-batches), to be undone; it must be the same for the whole window. `is_last`: it is
        known to be the window's last.
        """
        books = self._books
        if not self.is_open:
            first = self._next_seed is None
            books.seed = self._first_seed(given.units) if first else self._next_seed or 1.0
            books.divided_by = divided_by
        elif divided_by != books.divided_by:
            raise WindowError(
                f"the window's first loss was divided by {books.divided_by:g}, this one is by "
                f"{divided_by:g}: change the number of micro-batches between windows"
            )
        self.enter(given, given.loss, given.weight * books.seed, is_last=is_last)

    def enter(
        self, given: Given, flowing: Tensor, weight: Units = 1.0, *, is_last: bool = False
    ) -> None:
        """Enter a loss into the books; its backward, which starts at `flowing`, comes next."""
        books = self._books
        if books.broken:
            raise WindowError(
                "the last backward of this window failed half way and left part of its gradients "
                "behind: call discard() and optimizer.zero_grad() before going on"
            )
        is_whole = is_last and not self.is_open and self.ranks.size == 1
        self._look.at_backward(**given.as_written, in_parts=not is_whole)
        if not self.is_open:
            for policy in self._batchnorms:
                if isinstance(policy, Refuse):  # others have recorded the first forward already
                    policy.begin_window()
        flowing.register_hook(books.weighing(weight))
        books.totals.append(given.total)
        books.units.append(given.units)
        books.micro_batches += 1
        for policy in self._batchnorms:
            policy.micro()

    def _first_seed(self, units: Units) -> float:
        """A power of two near 1/units, the same on all ranks; later windows know better."""
        most = self.ranks.largest(torch.tensor(float(units), device=self._device))
        return power_of_two_near(1.0 / max(float(most), 1.0))

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Within it the host makes the backward of the loss that was weighed."""
        self.before_backward()
        try:
            yield
        except BaseException:
            self._books.broken = True  # some gradients of this micro-batch are in, others are not
            raise
        self.after_backward()

    def before_backward(self) -> None:
        """Refuse a window that does not begin clean, or that somebody has touched."""
        if self._books.begun:
            self._clean.check(self._books.micro_batches)
            return
        try:
            self._clean.begin(in_grad=self._in_grad)
        except WindowError:
            self.discard()
            raise
        self.sums.begin()
        self._books.begun = True

    def after_backward(self) -> None:
        """Note how the host's backward leaves the gradients."""
        self.sums.add()
        self._look.done()
        self._books.reduced = all(one.require_backward_grad_sync for one in self._replicas)
        if self._keeps:
            self._clean.remember()

    # ----------------------------------------------------------------- settle

    def settle(
        self,
        holders: Iterable[Holder] | None = None,
        *,
        averaged_by: float = 1.0,
        announced: float | None = None,
    ) -> Settled | None:
        """Bring the window's reduced gradients to those of the undivided global batch.

        `averaged_by` is what the host divided them by when it reduced them over the ranks.
        `announced`: the units of all ranks, where the host had counted them before and scaled by
        them; they must be those that came. None is returned where the window makes no update
        (`zero_units="skip"`, `nonfinite="skip"`): no gradient is left, so that the host's step
        changes nothing. After an error none is left either.
        """
        if not self.is_open:
            raise WindowError("settle() without a micro-batch: no backward was weighed")
        try:
            return self._settle(holders, averaged_by, announced)
        except BaseException:
            self.discard()
            clear(self._holders() if holders is None else ())
            raise

    def _settle(
        self, holders: Iterable[Holder] | None, averaged_by: float, announced: float | None
    ) -> Settled | None:
        books = self._books
        if books.micro_batches > 1 or self.ranks.size > 1:
            self._look.end_window(books.micro_batches)
        if not self._is_scaled():  # whose scaler may have unscaled the gradients already
            self._clean.check(books.micro_batches)
        books.check_complete(self.ranks.size, in_grad=self._in_grad)
        self.sums.finish(self.ranks, averaged_by)
        held = self._holders() if holders is None else list(holders)
        totals, units = read_scalars(books.totals), read_units(books.units)
        total, counted, spoiled = self.ranks.sum(
            [math.fsum(totals), units, float(not all_finite(held))]
        )
        if announced is not None and not math.isclose(announced, counted, rel_tol=1e-6):
            raise LossError(
                f"{announced:g} units were announced for this window, on all processes, and its "
                f"micro-batches brought {counted:g}: both must be counted on the same thing, so "
                "count units on what the loss is given"
            )
        if counted == 0.0:
            self._empty(held)
            return None
        finite = not spoiled and math.isfinite(total)
        if not finite and not self._left_to_scaler(total, bool(spoiled)):
            self._nonfinite(held, totals, total)
            return None
        factor = averaged_by * books.divided_by / (counted * books.seed)
        multiply(held, 1.0 if announced is not None else factor)
        self.sums.round_once()
        for policy in self._batchnorms:
            policy.end_window() if finite else policy.discard_window()
        settled = Settled(total / counted, counted, books.micro_batches)
        self._clear()
        self._next_seed = power_of_two_near(1.0 / counted)
        self.updates += 1
        self._clean.unused = True
        self.last = settled
        return settled

    def _holders(self) -> list[Holder]:
        return list(all_parameters(self._models, self._optimizers)) if self._in_grad else []

    def _empty(self, held: Sequence[Holder]) -> None:
        if self.options.zero_units == "raise":
            raise EmptyWindowError(
                f"all {self._books.micro_batches} micro-batches of this window have zero units "
                "(every label is ignored or every weight is zero), so its mean does not exist: "
                "filter such batches, or pass zero_units='skip' to make no update from them"
            )
        self._skip(held)

    def _skip(self, held: Sequence[Holder]) -> None:
        """No update: nothing for the host's step to work on."""
        self.discard()
        if self._is_scaled():  # a scaler wants gradients to look at
            multiply(held, 0.0)
        else:
            clear(held)
        self.skipped += 1
        self.last = None

    def _left_to_scaler(self, total: float, spoiled: bool) -> bool:
        """Whether the host's loss scale is to blame, and its scaler skips the step."""
        return spoiled and math.isfinite(total) and self._is_scaled()

    def _nonfinite(self, held: Sequence[Holder], totals: Sequence[float], total: float) -> None:
        books, ranks = self._books, self.ranks
        culprit = first_nonfinite({"": totals}, range(len(totals)))
        rank = ranks.rank if ranks.size > 1 else None
        losses = not math.isfinite(total)
        where = where_nonfinite(culprit, books.micro_batches, rank=rank, losses=losses, own=True)
        if self.options.nonfinite == "skip" and not self._is_scaled():
            self._skip(held)
            return
        raise NonFiniteError(
            f"update {self.updates + 1}: {where}. Nothing was updated: {Store.after_failure}",
            micro_batch=culprit,
        )

    def discard(self) -> None:
        """Forget the open window; clearing the gradients is the host's."""
        self._clear()
        for policy in self._batchnorms:
            policy.discard_window()

    def detach(self) -> None:
        """Leave the models as they were found (a conversion of BatchNorm is kept)."""
        self._look.end_window()
        for policy in self._batchnorms:
            policy.detach()

    # ----------------------------------------------------------------- state

    def state_dict(self, parameters: Sequence[nn.Parameter] | None = None) -> dict[str, Any]:
        """What the window holds; with `parameters`, their gradients too, of all ranks together.

        A checkpoint is one file, and every rank holds gradients of its own until the last
        backward. Their sum, given to one rank on the way back, leads to the same update: call it
        on all ranks. Without `parameters` the gradients are the host's to keep.
        """
        saved = {
            "updates": self.updates,
            "next_seed": self._next_seed,
            "batchnorms": [policy.state_dict() for policy in self._batchnorms],
            **self._books.saved(),
        }
        if parameters is not None and self.is_open:
            total, counted = self.ranks.sum([math.fsum(saved["totals"]), math.fsum(saved["units"])])
            saved.update(totals=[total], units=[counted])
            saved["gradients"] = summed(self.sums.held(parameters), parameters, self.ranks)
        return saved

    def load_state_dict(
        self, saved: dict[str, Any], parameters: Sequence[nn.Parameter] | None = None
    ) -> None:
        """Go on with that window; without `parameters`, its gradients must be back in place."""
        books = Books.loaded(saved)
        self._clear()
        self._books = books
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
        if self.ranks.rank != 0:  # the first rank has them all
            books.totals, books.units = [0.0], [0.0]
            return
        self.sums.put_back(parameters, saved["gradients"])
