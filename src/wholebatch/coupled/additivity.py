"""When to test that a loss adds up, on which samples, and on which ranks.

Entry points that run the forward have one `AdditivityTest`, and call it before every split window.
See `adds_up` for the test itself.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from wholebatch.batch.samples import Layout, readable_layout
from wholebatch.compile.captured_state import Fingerprint
from wholebatch.coupled.adds_up import SAMPLES, AdditivityResult, check_adds_up, free_memory_of_test
from wholebatch.coupled.causes import AuditFinding
from wholebatch.coupled.coupling_layers import refused_by_type
from wholebatch.coupled.last_reduction import StepDivision, find_step_division, last_reductions
from wholebatch.coupled.normalisation_layers import is_spectral_norm
from wholebatch.distributed.sync_strategy import Sync
from wholebatch.errors import UnsupportedError, WholebatchError
from wholebatch.losses.loss import Loss, OfTheBatch, Terms, as_loss, terms_of
from wholebatch.window.forward_state import (
    ForwardState,
    capture_random,
    restore_random,
    set_state_of,
    state_of,
)
from wholebatch.window.own_generators import own_generators
from wholebatch.window.window import is_tested_window

_log = logging.getLogger("wholebatch")
_TRIES = 8


@dataclass(frozen=True)
class WindowData:
    """The data of one window that is about to run: its batch, and its micro-batches."""

    batch: Any
    micros: Sequence[Any] = ()
    layout: Mapping[str, Any] = field(default_factory=lambda: {"batch_size": None, "static": ()})
    steps: Collection[int] = ()
    """Numbers that a loop may call its accumulation steps: no mean may be divided by them."""

    def first_samples(self) -> Layout | None:
        """Return the batch; its first samples are tested."""
        whole = readable_layout(self.batch, **self.layout)
        made = self._layouts()
        sizes = [1 if one is None else one.size for one in made]
        # Micro-batches of different sizes, by a budget of tokens: the first holds samples that
        # belong together.
        if whole is not None and sum(sizes) == whole.size and len(set(sizes[:-1])) > 1:
            return made[0] if sizes[0] > 1 else whole
        return whole

    def micro_sizes(self) -> set[int]:
        """Return the numbers of samples of all micro-batches but the last."""
        return {one.size for one in self._layouts()[:-1] if one is not None}

    def _layouts(self) -> list[Layout | None]:
        static = self.layout["static"]
        return [readable_layout(micro, None, static) for micro in self.micros]

    def micro_batch(self, turn: int) -> Layout | None:
        """Return a whole micro-batch, another one at each turn."""
        if not self.micros:
            return self.first_samples()
        return readable_layout(self.micros[turn % len(self.micros)], None, self.layout["static"])


class AdditivityTest:
    """Tests in windows 1, 2, 4, 8, ... that the loss adds up over micro-batches.

    The first test takes up to 8 samples with their gradient. Later ones take a whole micro-batch,
    forward only: couplings among many samples show there, and so do mistakes that depend on later
    data or weights. After a change of the model, or of what `loss` reads, the first test is made
    again. A batch whose samples have no units tells nothing: the next window is tested then.

    All ranks test the same windows; what one finds, all refuse. `sync=None`: this rank tests alone.
    `shares_forwards`: a forward meets the other ranks (FSDP, DeepSpeed), so that every rank makes
    the same runs, and no gradient is compared. `off` is how a user trains all the same.
    """

    def __init__(
        self,
        model: nn.Module,
        sync: Sync | None,
        *,
        enabled: bool,
        shares_forwards: bool = False,
        off: str = "audit=False",
        loss: Callable[..., Any] | None = None,
    ) -> None:
        self._model, self._sync, self._off, self._loss = model, sync, off, loss
        self._ranks = 1 if sync is None else sync.ranks
        self._enabled, self._shares_forwards = enabled, shares_forwards
        self._windows = self._tests = 0
        self._tries = _TRIES  # of the first test
        self._fingerprint: Fingerprint | None = None  # of what the loss reads, at the first test
        self._has_changed, self._next_look = False, 0
        self._is_due = False
        self._unread_steps: Collection[int] = ()

    def begin_window(self, changed: bool | None = None) -> bool:
        """Count a window that is split; return True if it is to be tested."""
        self._windows += 1
        if self._ranks == 1 and self._reads_another_value(changed):
            self._tries = 1
        due = self._tries > 0 or is_tested_window(self._windows)
        self._is_due = self._enabled and due
        return self._is_due

    def _reads_another_value(self, changed: bool | None) -> bool:
        """True if the model or its loss reads another value than at the first test.

        Graphs know what has `changed`. A value that is another one in every window (an annealed
        weight) is looked at after 1, 2, 4, 8, ... windows.
        """
        self._has_changed |= bool(changed)
        if self._fingerprint is None or self._windows < self._next_look:
            return False
        if not self._has_changed and (changed is not None or self._fingerprint.holds()):
            return False
        self._fingerprint, self._has_changed = None, False
        self._next_look = 2 * self._windows
        return True

    @property
    def is_next_due(self) -> bool:
        """True if the next window is to be tested, unless the model changes before it."""
        return self._enabled and (self._tries > 0 or is_tested_window(self._windows + 1))

    @property
    def is_due(self) -> bool:
        """True if the window that has begun is to be tested, and was not yet."""
        return self._is_due

    @property
    def turn(self) -> int:
        """The number of tests so far: each takes another micro-batch."""
        return self._tests

    def test(
        self,
        run: Callable[[Any], Any],
        samples: WindowData,
        *,
        outputs: bool = False,
        name: str = "the loss function",
    ) -> None:
        """Refuse what does not add up, and layers that cannot by their type, on all ranks.

        `run`, `outputs` and `name` are those of `check_adds_up`.
        """
        self._is_due, is_first = False, self._tries > 0
        if is_first and self._shares_forwards:
            self._unread_steps = samples.steps
        divisions: list[StepDivision | None] = []

        def first(few: Any) -> Any:
            result = run(few)
            if not divisions:
                divisions.append(_division(result, samples.steps))
            return result

        found = refused_by_type(self._model)
        layout = samples.first_samples() if is_first else samples.micro_batch(self._tests)
        result = AdditivityResult(conclusive=False)
        self._tests += 1
        if self._all(layout is not None and layout.size > 1):
            try:
                check = partial(
                    check_adds_up,
                    self._model,
                    first if is_first else run,
                    names_layers=self._ranks == 1 and not self._shares_forwards,
                    outputs=outputs,
                    name=name,
                    micro_sizes=samples.micro_sizes(),
                    batch=samples.first_samples(),
                )
                result = check(layout, gradients=is_first and not self._shares_forwards)
                if is_first and not (result.conclusive or result.findings) and self._ranks == 1:
                    # Eight samples may have no units, where a micro-batch has some.
                    result = check(samples.micro_batch(self._tests - 1), gradients=False)
            except torch.OutOfMemoryError:
                _log.warning("the loss was not tested to add up over micro-batches: out of memory")
            except Exception as error:  # most often the loss's own, and the step will raise it
                found += self._not_testable(error, run, samples, outputs)
        for division in divisions:
            if division is not None and division.is_sure:
                name = "the loss function"
                text = division.message
                found.append(AuditFinding(name, "division by the steps", "divided", text))
            elif division is not None:
                division.report()
        self._end((*found, *result.findings), result.conclusive)
        if not self._tries and self._ranks == 1 and self._loss is not None:
            self._fingerprint = Fingerprint(self._model, self._loss)

    def read(self, loss: Loss | Terms) -> None:
        """Refuse a first loss that is divided by the number of steps; the test made no graph."""
        if self._unread_steps:
            found, self._unread_steps = _division(loss, self._unread_steps), ()
            if found is not None:
                found.report(self._off)

    def join(self) -> None:
        """Take part in the other ranks' test, without a sample of one's own."""
        if self._is_due:
            self._is_due = False
            self._all(False)
            self._end((), False)

    def _all(self, is_true: bool) -> bool:
        """True if this is so on every rank: a loss may meet the other ranks."""
        if self._sync is None or self._ranks == 1:
            return is_true
        return self._sync.sum([float(is_true)])[0] == self._ranks

    def _end(self, found: tuple[AuditFinding, ...], conclusive: bool) -> None:
        """Refuse what any rank has found; test again if the test told nothing on one of them."""
        sums = [float(len(found)), float(conclusive)]
        if self._sync is not None:
            sums = self._sync.sum(sums)
        self._tries = 0 if sums[1] == self._ranks else self._tries - 1
        AdditivityResult(found).refuse(self._off, on_another_rank=sums[0] > 0)

    @torch.no_grad()
    def _not_testable(
        self, error: Exception, run: Callable[[Any], Any], samples: WindowData, outputs: bool
    ) -> list[AuditFinding]:
        """Refuse a loss that runs on a micro-batch, but not on a part of it.

        What cannot be refused is logged, if the step itself will not raise it.
        """
        is_alone = self._ranks == 1 and bool(samples.micros)
        if is_alone:
            try:
                own = own_generators(self._model, run)
                with ForwardState(self._model, generators=own):
                    made = run(samples.micros[0])
                    if not outputs:
                        as_loss(made)
            except Exception:
                return []  # The step will raise it.
        # A list of samples has no leaf that could be read wrongly: its loss may take one at a time.
        may_be_right = isinstance(error, WholebatchError) or isinstance(samples.batch, list)
        if may_be_right or not is_alone:
            _log.warning("the loss was not tested to add up over micro-batches: %r", error)
            return []
        text = (
            f"it runs on a micro-batch, but not on another number of samples ({error!r}), so "
            "wholebatch cannot test if micro-batches add up to the batch. If the batch has a leaf "
            "that is not a value per sample, name it: micro_batch=wb.samples(8, static=...)"
        )
        return [AuditFinding("the loss function", type(error).__name__, "loss", text)]


class UnmovedLoss:
    """Tests that the loss of some samples stays the same from a window's first micro-batch on.

    The weights do not move within a window. If the loss of the same samples does, the loop moves
    something else once per micro-batch: a teacher that follows the model, or a counter.
    """

    def __init__(self, model: nn.Module, run: Callable[[Any], Any], micro: Any) -> None:
        layout = readable_layout(micro, None, ())
        self._few = micro if layout is None else layout.take(list(range(min(layout.size, SAMPLES))))
        self._model, self._run = model, run
        self._random = capture_random()
        self._generators = [(one, state_of(one)) for one in own_generators(model, run)]
        self._first: float | None = None
        # A spectral norm moves with every forward, and was warned of.
        if not any(map(is_spectral_norm, model.modules())):
            self._first = self._value()
        again = self._value() if self._first is not None else None
        if self._first is None or again is None:
            self._first = None
            return
        # Some kernels, and generators of the user's own, give another number each time.
        self._allowed = max(10 * abs(again - self._first), 1e-6 * abs(self._first))

    def check(self) -> None:
        """Refuse a loss that has moved since this test was made."""
        now = None if self._first is None else self._value()
        if self._first is None or now is None or abs(now - self._first) <= self._allowed:
            return
        raise UnsupportedError(
            f"the loss of the same samples was {self._first:.6g} at the first micro-batch of this "
            f"window and is {now:.6g} at its last, although the weights have not changed: "
            "something changes with every micro-batch (a teacher that follows the model, a "
            "counter, the number of the batch). Change it once per update, after the Step. "
            "audit=False skips this test"
        )

    @torch.no_grad()
    def _value(self) -> float | None:
        """Return the loss of the samples; None if it is not finite, or if they cannot run alone."""
        try:
            own = [one for one, _ in self._generators]
            with ForwardState(self._model, generators=own):
                restore_random(self._random)
                for one, state in self._generators:
                    set_state_of(one, state)
                terms = terms_of(as_loss(self._run(copy.deepcopy(self._few))))
                total = sum(float(term.total) for term in terms.values())
        except Exception as problem:
            _log.debug("not tested if the loss moves within a window: %r", problem)
            return None
        finally:
            free_memory_of_test()
        return total if math.isfinite(total) else None


def _division(loss: Any, steps: Collection[int]) -> StepDivision | None:
    """Return the division of a loss by the number of steps, as its graph tells it."""
    if not isinstance(loss, Loss | Terms) or isinstance(loss, OfTheBatch):
        return None
    read = (
        find_step_division(last_reductions(term.total), term.units, steps)
        for term in terms_of(loss).values()
    )
    return next((found for found in read if found is not None), None)
