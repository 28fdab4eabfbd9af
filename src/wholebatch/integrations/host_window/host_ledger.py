"""A window in a loop that is somebody else's.

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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.core.close import (
    Holder,
    first_nonfinite,
    power_of_two_near,
    read_scalars,
    read_units,
    where_nonfinite,
)
from wholebatch.core.loss import Units
from wholebatch.coupled import choose as choose_batchnorm
from wholebatch.coupled.audit import audit as audit_of
from wholebatch.coupled.batchnorm.policies import Refuse
from wholebatch.coupled.stream_look import StreamLook
from wholebatch.distributed.fsdp import check_dtypes
from wholebatch.errors import (
    EmptyWindowError,
    LossError,
    NonFiniteError,
    StateError,
    WindowError,
)
from wholebatch.integrations.host_window.adapter_options import Options
from wholebatch.integrations.host_window.books import Books, Settled
from wholebatch.integrations.host_window.clean_gradients import Clean
from wholebatch.integrations.host_window.host_gradients import (
    Gradients,
    WideSums,
    all_finite,
    all_parameters,
    clear,
    multiply,
    summed,
)
from wholebatch.integrations.host_window.host_ranks import Ranks, ranks_of
from wholebatch.integrations.host_window.total_or_mean import Given
from wholebatch.offload import Store

__all__ = ["Hosted"]

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
        if self._keeps and not owns_forward and self.ranks.size > 1 and not self._replicas:
            _log.warning(
                "a plain model in a job of %d ranks: nothing reduces its gradients, and each rank "
                "trains a model of its own. Pass the model that accelerator.prepare() or "
                "fabric.setup() returned",
                self.ranks.size,
            )
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
