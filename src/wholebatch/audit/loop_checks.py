"""Ask the checks of a loop, in the windows that each of them is for.

Your own loop passes its losses, but runs the forwards itself. So only a list of mistakes is tested.
`acc.run` and `WholeBatch` test the loss function itself, and `wb.verify` proves the whole update.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import nn

from wholebatch.audit.check import Answer, Check, MicroBatch, Refused, Warned, silenced
from wholebatch.audit.compared_rows import ComparedRows
from wholebatch.audit.coupling_layers import CouplingLayers
from wholebatch.audit.divided_by_steps import DividedBySteps
from wholebatch.audit.finding import AuditFinding, refuse
from wholebatch.audit.first_call import FirstCall
from wholebatch.audit.foreign_batchnorm import ForeignBatchNorm
from wholebatch.audit.hidden_reduction import HiddenReduction
from wholebatch.audit.mean_as_one_unit import MeanAsOneUnit
from wholebatch.audit.mean_units import UnitsOfMeans
from wholebatch.audit.model_calls import ModelCalls
from wholebatch.audit.other_models import OtherModels
from wholebatch.audit.scaled_loss import ScaledLoss
from wholebatch.audit.sum_or_mean import SumOrMean
from wholebatch.losses.loss import Loss, OfMean, Terms, refuse_in_parts, terms_of
from wholebatch.warn_user import warn_user
from wholebatch.window.autograd_graph import refuse_freed_graph
from wholebatch.window.window import is_tested_window

LAWS: tuple[type[Check], ...] = (
    OtherModels,
    CouplingLayers,
    ForeignBatchNorm,
    SumOrMean,
    HiddenReduction,
    ScaledLoss,
    MeanAsOneUnit,
    ComparedRows,
    FirstCall,
    DividedBySteps,
    UnitsOfMeans,
)
"""To add a law, write its file and put its class here."""


class LoopChecks:
    """Asks a list of checks at four places of a window.

    ```python
    checks = LoopChecks(models, audit=audit)
    checks.begin_window(number)           # the window begins
    checks.watch()                        # before the first forward of a window: hooks on models
    checks.check(loss)                    # a micro-batch: before every backward
    checks.end_micro_batch()              # an addition: after the last backward of a micro-batch
    checks.end_window(micro_batches)      # the close: then the hooks go
    ```

    `checks` is the list; by default, one check of each law.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        audit: bool = True,
        checks: Sequence[Check] | None = None,
    ) -> None:
        self._models, self._audits = list(models), audit
        self.list = [law() for law in LAWS] if checks is None else list(checks)
        self._ask(first=audit, tested=False)
        self._calls = ModelCalls(self._models)
        self._have_warned: set[Check] = set()
        self._has_stopped = False

    def _ask(self, *, first: bool, tested: bool) -> None:
        """Ask the checks of the first window, and those of windows 1, 2, 4, 8, …"""
        self.active, self.tests_units = first, tested
        self.are_asked = first or tested
        """True if checks are asked in this window."""

    def _asked(self) -> list[Check]:
        """Return the checks that are asked in this window."""
        return [
            check
            for check in self.list
            if (self.active if check.windows == "the first" else self.tests_units)
        ]

    def begin_window(self, number: int) -> None:
        """Begin a window; `number` counts windows from 1."""
        is_tested = self._audits and is_tested_window(number)
        self._ask(first=self.active, tested=is_tested and not self._has_stopped)
        if is_tested:
            self._report((check, check.window_begins()) for check in self.list)

    def watch(self, *, calls: bool = True) -> None:
        """Note the outputs of the models; with `calls`, test the first call of each."""
        if self.active and self.list:
            self._calls.watch(tests=calls)

    def check(
        self, loss: Loss | Terms, *, in_parts: bool = True, steps: Collection[int] = ()
    ) -> None:
        """Refuse a loss with one of the mistakes that are tested.

        `in_parts` is False where this micro-batch is all of its window and there is one rank: any
        loss is right. `steps` are the numbers that a loop may call its accumulation steps.
        """
        if not self._audits or not in_parts:
            return
        refuse_in_parts(loss)
        checks = self._asked()
        for term in terms_of(loss).values() if checks else ():
            if term.total.grad_fn is None:
                continue  # no loss at all, which is refused elsewhere
            micro = MicroBatch(
                term.total,
                term.units,
                is_mean=isinstance(loss, OfMean),
                steps=steps,
                outputs=self._calls.outputs,
                models=self._models,
                first_calls=self._calls.findings,
                foreign_norms=self._calls.foreign_norms(),
                keeps_parameters=self._calls.tests,
            )
            try:
                self._report((check, check.micro_batch(micro)) for check in checks)
            except RuntimeError as error:
                refuse_freed_graph(error)
                raise

    def end_micro_batch(self) -> None:
        """Note that all gradients of a micro-batch have been added."""
        self._report((check, check.addition()) for check in self.list)
        self._calls.outputs.clear()

    def end_window(self, micro_batches: int = 0) -> None:
        """End a window that is about to make its update, of this many micro-batches."""
        checks, was_first = self._asked(), self.active
        self._ask(first=False, tested=self.tests_units)
        bypassed = self._calls.bypassed() if was_first else None
        if bypassed is not None:
            begin = f"{type(bypassed).__name__} itself was not called"
            warn_user(
                f"{begin}, only its layers: model.forward(x), or another of its methods, is not "
                "tested for samples that act on each other. Call model(x), or run wb.verify once; "
                f"{silenced(begin)}"
            )
        self._take_hooks_off()
        self._report((check, check.close(micro_batches)) for check in checks)

    def _report(self, answers: Iterable[tuple[Check, Answer | Iterable[Answer]]]) -> None:
        """Raise what was refused; warn of the rest, once for each check."""
        flat: list[tuple[Check, Answer]] = []
        for check, answer in answers:
            if answer is None or isinstance(answer, Refused | Warned | AuditFinding):
                flat.append((check, answer))
            else:
                flat.extend((check, each) for each in answer)
        for _, answer in flat:
            if isinstance(answer, Refused):
                raise answer.error(answer.because)
        refuse([answer for _, answer in flat if isinstance(answer, AuditFinding)])
        for check, answer in flat:
            if isinstance(answer, Warned) and check not in self._have_warned:
                self._have_warned.add(check)
                warn_user(answer.because)

    def stop(self) -> None:
        """Take the hooks off the models, and check nothing more but the type of losses."""
        self._ask(first=False, tested=False)
        self._has_stopped = True
        self._take_hooks_off()

    def _take_hooks_off(self) -> None:
        self._calls.take_hooks_off()
        self._calls.outputs.clear()
