"""Watch the windows of an own loop: what is certain is refused, what is likely is told once.

An own loop passes its losses, but runs the forwards itself. So only a list of mistakes is looked
for. `acc.run` and `WholeBatch` test the loss function itself, and `wb.verify` proves the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

from torch import nn

from wholebatch.audit.check import Check, LossOfMicroBatch
from wholebatch.audit.compared_rows import ComparedRows
from wholebatch.audit.divided_by_steps import DividedBySteps
from wholebatch.audit.finding import refuse
from wholebatch.audit.first_call import FirstCall
from wholebatch.audit.foreign_writes import ForeignWrites
from wholebatch.audit.layers import refused_by_type
from wholebatch.audit.mean_units import UnitsOfMeans
from wholebatch.audit.model_calls import ModelCalls
from wholebatch.audit.other_models import OtherModels
from wholebatch.audit.own_reduction import OwnReduction
from wholebatch.losses.loss import Loss, OfMean, Terms, refuse_in_parts, terms_of
from wholebatch.warn_user import warn_user
from wholebatch.window.autograd_graph import refuse_freed_graph
from wholebatch.window.model_and_optimizer import Target
from wholebatch.window.observer import Observer, Plan
from wholebatch.window.window import is_tested_window

OF_A_LOSS: tuple[type[Check], ...] = (OwnReduction, DividedBySteps, UnitsOfMeans)
"""Those that need the loss alone."""
CHECKS: tuple[type[Check], ...] = (*OF_A_LOSS, OtherModels, ComparedRows, FirstCall)
"""To add a law, write its file and put its class here."""


class OwnLoop(Observer):
    """Asks a list of checks at the moments of a window."""

    def __init__(self, target: Target, checks: Sequence[type[Check]] = CHECKS) -> None:
        self._writes = ForeignWrites(target)
        self._models: WeakSet[nn.Module] = WeakSet(target.models)
        left_out = () if target.sync.runs_alone else (FirstCall, ComparedRows, OtherModels)
        self._checks = [check() for check in checks if check not in left_out]
        self._have_warned: set[Check] = set()
        self._is_first = True  # until the first window in parts has closed
        self._plan = Plan(0, in_parts=False)
        before = [check.call for check in self._checks if isinstance(check, FirstCall)]
        after = [check.returned for check in self._checks if isinstance(check, ComparedRows)]
        self._calls = ModelCalls(target.models, before, after) if before or after else None

    def window_begins(self, plan: Plan) -> None:
        self._plan = plan
        self._writes.forget()
        if plan.in_parts and self._is_first:
            for model in self._models:
                refuse(refused_by_type(model))
        for check in self._asked():
            check.window_begins()

    def backward_begins(self) -> None:
        self._writes.check()

    def loss_is_known(self, loss: Loss | Terms) -> None:
        if not self._plan.in_parts:
            return
        refuse_in_parts(loss)
        asked = self._asked()
        for term in terms_of(loss).values() if asked else ():
            if term.total.grad_fn is None:
                continue  # no loss at all, which is refused elsewhere
            micro = LossOfMicroBatch(term.total, term.units, isinstance(loss, OfMean), self._plan)
            try:
                for check in asked:
                    for warning in check.loss_is_known(micro):
                        self._tell(check, warning)
            except RuntimeError as error:
                refuse_freed_graph(error)
                raise

    def gradients_are_added(self, parameters: Sequence[nn.Parameter]) -> None:
        self._writes.remember(parameters)

    def window_closes(self) -> None:
        self._writes.check()
        self._writes.check_rates()
        self._writes.forget()  # a rank without data joins the next window, which does not begin
        if not self._plan.in_parts:
            return
        self._is_first = False
        if self._calls is not None:
            self._calls.take_off()
            self._calls = None

    def _asked(self) -> list[Check]:
        """Return the checks that are asked in this window."""
        is_tested = self._plan.in_parts and is_tested_window(self._plan.number)
        is_first = self._plan.in_parts and self._is_first
        return [check for check in self._checks if (is_first if check.only_first else is_tested)]

    def _tell(self, check: Check, warning: str) -> None:
        """Warn, once for each check."""
        if check not in self._have_warned:
            self._have_warned.add(check)
            warn_user(warning)
