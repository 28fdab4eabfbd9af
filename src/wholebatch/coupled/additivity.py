"""When to test that a loss adds up, on which samples, and on which ranks.

Entry points that run the forward have one `AdditivityTest`, and call it before every split window:
choose samples (`WindowData`, `Plan`), compare them with their parts (`adds_up`), refuse the cause.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from wholebatch.batch.micro_batches import joined
from wholebatch.batch.samples import Layout, readable_layout
from wholebatch.coupled.adds_up import (
    SAMPLES,
    UNTESTED,
    AdditivityResult,
    check_adds_up,
    free_memory_of_test,
)
from wholebatch.coupled.causes import AuditFinding
from wholebatch.coupled.coupling_layers import refused_by_type
from wholebatch.coupled.normalisation_layers import is_spectral_norm
from wholebatch.coupled.sample_runs import fewer_tokens, spread_rows
from wholebatch.distributed.process_group import Group
from wholebatch.errors import UnsupportedError, WholebatchError
from wholebatch.losses.loss import as_loss, terms_of
from wholebatch.window.forward_state import (
    ForwardState,
    ModelParts,
    capture_random,
    restore_random,
    set_state_of,
    state_of,
)
from wholebatch.window.reachable_objects import own_generators
from wholebatch.window.window import is_tested_window

_log = logging.getLogger("wholebatch")
_NOT_TESTED = "the loss was not tested to add up over micro-batches: %s"
_TRIES = 8  # windows in which a test that told nothing is made again
_MORE = 3  # times that it is made again in the same window
_OF_PARTS = ("unrunnable", "held")  # findings that say nothing of a micro-batch that stays whole


# --------------------------------------------------------------------- choose samples


@dataclass(frozen=True)
class WindowData:
    """The data of one window that is about to run: its batch, and its micro-batches."""

    batch: Any
    micros: Sequence[Any] = ()
    layout: Mapping[str, Any] = field(default_factory=lambda: {"batch_size": None, "static": ()})

    @property
    def is_split_by_us(self) -> bool:
        """False for what acc.run and a trainer are given: its rows may be nodes of a graph."""
        return len(self.micros) > 1

    def samples(self) -> Layout | None:
        """Return the batch, whose samples are tested; None if it cannot be taken apart."""
        return readable_layout(self.batch, **self.layout)

    def micro_sizes(self) -> list[int]:
        """Return the numbers of samples of the micro-batches; 1 where it is not known."""
        layouts = map(self._layout, self.micros)
        return [1 if layout is None else layout.size for layout in layouts]

    def micro_batch(self, turn: int) -> Layout | None:
        """Return a whole micro-batch, another one at each turn."""
        return self._layout(self.micros[turn % len(self.micros)]) if self.micros else self.samples()

    def _layout(self, micro: Any) -> Layout | None:
        return readable_layout(micro, None, self.layout["static"])


@dataclass(frozen=True)
class Plan:
    """How many samples of a batch a test runs: in the memory of a micro-batch."""

    layout: Layout
    micro: int
    """The samples that are known to fit with a graph: those of a micro-batch."""
    fits: float
    """The samples that are known to fit into memory."""

    @property
    def with_graph(self) -> int:
        """The number of samples whose gradients are compared."""
        return int(min(self.layout.size, self.micro, SAMPLES, self.fits))

    @property
    def without_graph(self) -> int:
        """The number of samples whose losses alone are compared: they leave no activations."""
        most = max(3, min(2 * self.micro, SAMPLES), self.micro)
        return int(min(self.layout.size, most, self.fits))

    def in_another_order(self) -> Any:
        """Return samples of which other ones make the parts."""
        rows = list(reversed(range(self.layout.size)))
        mixed = [row for start in range(3) for row in rows[start::3]]
        return self.layout.take(mixed[: self.without_graph])


class GatheredSamples:
    """Two samples of each micro-batch of a window, as one batch.

    A loop gives one micro-batch after the other. If each is homogeneous (sorted by length, one
    class), a mean over the wrong units adds up in all of them, and not over the window.
    """

    def __init__(self, micros: Sequence[Any] = ()) -> None:
        self._few: list[Any] = []
        self._smallest = SAMPLES
        for micro in micros:
            self.add(micro)

    def add(self, micro: Any) -> None:
        """Copy the first and the last sample of a micro-batch."""
        layout = readable_layout(micro, None, ())
        if layout is not None:
            self._few.append(layout.take(sorted({0, layout.size - 1})))
            self._smallest = min(self._smallest, layout.size)

    def layout(self) -> Layout | None:
        """Return the samples as one batch; None if they have different shapes, or are too few."""
        number = min(len(self._few), max(3, min(2 * self._smallest, SAMPLES)))
        if number < 2:
            return None
        whole = joined([self._few[place] for place in spread_rows(len(self._few), number)])
        return None if whole is None else readable_layout(whole, None, ())


# --------------------------------------------------------------------- when, and on which ranks


class AdditivityTest:
    """Tests in windows 1, 2, 4, 8, ... that the loss adds up over micro-batches.

    Its samples are spread over the batch. The first test takes up to 8 with their gradient, but
    never more than a micro-batch has. Later ones take as many as a micro-batch, forward only:
    couplings among many samples show there, and so do mistakes that depend on later data or
    weights. After a change of the model, or of what a graph reads, the first test is made again.
    A batch whose samples have no units tells nothing: the next window is tested then. A number of
    samples that ran out of memory is not tried again.

    All ranks of the group test the same windows; what one finds, all refuse.
    `shares_forwards`: a forward meets the other ranks (FSDP, DeepSpeed), so that every rank makes
    the same runs, and no gradient is compared. `off` is how a user trains all the same.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        *,
        enabled: bool,
        shares_forwards: bool = False,
        off: str = "audit=False",
        owned: nn.Module | None = None,
    ) -> None:
        self._owned = owned
        self._model, self._group, self._off = model, group, off
        self._enabled, self._shares_forwards = enabled, shares_forwards
        self._is_free = group.ranks == 1 and not shares_forwards
        """True if it may make more runs than other ranks."""
        self._windows = self.turn = 0
        """The number of tests so far: each takes another micro-batch."""
        self._tries = _TRIES  # of the first test
        self._more = _MORE
        self._as_tested: ModelParts | None = None  # what the first test has seen of the model
        self._has_changed, self._next_look = False, 0
        self.is_due = False
        """True if the window that has begun is to be tested, and was not yet."""
        self._has_told = False  # that the loss was not tested
        self._most: float = math.inf  # samples that fit into memory, as far as is known

    def begin_window(self, changed: bool = False) -> bool:
        """Count a window that is split; return True if it is to be tested.

        `changed`: graphs have noticed that the code reads another value than before.
        """
        self._windows += 1
        self._more = _MORE
        if self._is_another(changed):
            self._tries = 1
        self.is_due = self._enabled and (self._tries > 0 or is_tested_window(self._windows))
        return self.is_due

    def _is_another(self, changed: bool) -> bool:
        """True if the model or what its loss reads is another than at the first test.

        A value that is another one in every window (an annealed weight) is looked at after 1, 2, 4,
        8, ... windows.
        """
        self._has_changed |= changed
        if self._as_tested is None or self._windows < self._next_look:
            return False
        if not self._has_changed and self._as_tested.hold():
            return False
        self._as_tested, self._has_changed = None, False
        self._next_look = 2 * self._windows
        return True

    @property
    def is_next_due(self) -> bool:
        """True if the next window is to be tested, unless the model changes before it."""
        return self._enabled and (self._tries > 0 or is_tested_window(self._windows + 1))

    def test(
        self,
        run: Callable[[Any], Any],
        data: WindowData,
        *,
        outputs: bool = False,
        name: str = "the loss function",
    ) -> None:
        """Refuse what does not add up, and layers that cannot by their type, on all ranks.

        `run`, `outputs` and `name` are those of `check_adds_up`.
        """
        self.is_due = False
        self.turn += 1
        layout, result = data.samples(), AdditivityResult(conclusive=False)
        if layout is None:
            self._tell(
                f"a {type(data.batch).__name__} cannot be taken apart into samples. Give a dict, a "
                "tuple or a dataclass of tensors, or run wb.verify"
            )
        if self._all(layout is not None and layout.size > 1 and self._most > 1):
            assert layout is not None
            result = self._result(run, data, layout, outputs=outputs, name=name)
        by_type = refused_by_type(self._model)
        self._end((*by_type, *result.findings), result.conclusive)
        if not self._tries and self._is_free:
            self._as_tested = ModelParts(self._model, numbers=True)

    def _result(
        self,
        run: Callable[[Any], Any],
        data: WindowData,
        layout: Layout,
        *,
        outputs: bool,
        name: str,
    ) -> AdditivityResult:
        """Compare samples of this window, on this rank."""
        sizes = data.micro_sizes()
        is_part = layout.size < sum(sizes)  # a trainer's batches, of which it is one
        # Samples of several micro-batches may all be long ones: the smallest holds as many.
        smallest = layout.size if is_part else min(sizes[:-1] or sizes or [layout.size])
        plan = Plan(layout, smallest, self._most)
        check = partial(
            check_adds_up,
            self._model,
            run,
            names_layers=self._is_free,
            outputs=outputs,
            name=name,
            micro_sizes=sizes[:-1],
            batch=layout,
            owned=self._owned,
        )
        try:
            result = self._compare(check, plan, data)
        except torch.OutOfMemoryError:
            most = max(plan.with_graph, plan.without_graph)
            self._most, result = most // 2, AdditivityResult()
            why = f"{most} samples ran out of memory in the test, and are not tried again"
            _log.warning(_NOT_TESTED, why)
        except Exception as error:  # most often the loss's own, and the step will raise it
            refused = self._not_testable(error, run, data, layout, outputs)
            result = AdditivityResult(tuple(refused), conclusive=False)
        free_memory_of_test()  # Not earlier: an error holds the tensors of its frames.
        findings = self._without_doubtful(result.findings, data)
        if is_part and self._is_free and not outputs:
            findings += self._over_micro_batches(run, GatheredSamples(data.micros), layout)
        return AdditivityResult(tuple(findings), result.conclusive)

    def _compare(
        self, check: Callable[..., AdditivityResult], plan: Plan, data: WindowData
    ) -> AdditivityResult:
        """Compare samples; in the first test other ones too, where these tell nothing.

        One part of them may have no units: other samples, in another order, have some. Eight
        samples may have none, where a micro-batch has some.
        """
        if self._tries <= 0:
            return check(plan.layout, count=plan.without_graph, gradients=False)
        result = self._compare_first(check, plan)
        if self._is_free and not (result.conclusive or result.findings):
            mixed = readable_layout(plan.in_another_order(), **data.layout)
            result = check(mixed, gradients=False)
        if self._is_free and not (result.conclusive or result.findings):
            result = check(data.micro_batch(self.turn - 1), gradients=False)
        return result

    def _compare_first(
        self, check: Callable[..., AdditivityResult], plan: Plan
    ) -> AdditivityResult:
        """Compare losses, and gradients with no more samples than a micro-batch has."""
        if self._shares_forwards:
            return check(plan.layout, count=plan.without_graph, gradients=False)
        losses = min(plan.without_graph, SAMPLES)
        if not self._is_free:  # equally often on all of them, whatever is found: their losses meet
            whole = check(plan.layout, count=losses, gradients=False)
            has_graph = plan.with_graph > 1
            again = check(plan.layout, count=max(plan.with_graph, 2), gradients=has_graph)
            told = whole.conclusive or again.conclusive
            return AdditivityResult(whole.findings or again.findings, told)
        if plan.with_graph >= losses:
            return check(plan.layout, count=plan.with_graph)
        whole = check(plan.layout, count=losses, gradients=False)
        if whole.findings or not whole.conclusive:
            return whole
        if plan.with_graph > 1:
            return check(plan.layout, count=plan.with_graph)
        shorter = fewer_tokens(plan.layout)  # Two samples of half the length take as much as one.
        if shorter is not None:
            with suppress(RuntimeError, ValueError, IndexError):  # It needs all of its tokens.
                return check(shorter, count=2, batch=shorter)
        return whole  # micro-batches of one sample: no gradients are compared

    def test_gathered(
        self, run: Callable[[Any], Any], gathered: GatheredSamples, micro: Any
    ) -> None:
        """Refuse a loss that does not add up over the micro-batches of a window, forward only.

        `micro` is one of them: neighbours that belong together are found in it.
        """
        findings = self._over_micro_batches(run, gathered, readable_layout(micro, None, ()))
        AdditivityResult(tuple(findings)).refuse(self._off)

    def _over_micro_batches(
        self, run: Callable[[Any], Any], gathered: GatheredSamples, batch: Layout | None
    ) -> list[AuditFinding]:
        layout, result = None, AdditivityResult()
        try:
            layout = gathered.layout()
            if layout is not None and layout.size <= self._most:
                result = check_adds_up(self._model, run, layout, gradients=False, batch=batch)
        except torch.OutOfMemoryError:
            self._most = 1 if layout is None else layout.size // 2
        except Exception as error:  # samples of different micro-batches do not go together
            _log.debug("samples of a window's micro-batches were not run together: %r", error)
        free_memory_of_test()
        return [each for each in result.findings if each.kind not in (*UNTESTED, *_OF_PARTS)]

    def join(self) -> None:
        """Take part in the other ranks' test, without a sample of one's own."""
        if self.is_due:
            self.is_due = False
            self._all(False)
            self._end((), False)

    def _all(self, is_true: bool) -> bool:
        """True if this is so on every rank: a loss may meet the other ranks."""
        return self._group.sum([float(is_true)])[0] == self._group.ranks

    def _end(self, findings: tuple[AuditFinding, ...], conclusive: bool) -> None:
        """Refuse what any rank has found; test again if the test told nothing on one of them."""
        sums = self._group.sum([float(len(findings)), float(conclusive)])
        is_first = self._more == _MORE
        self._tries = 0 if sums[1] == self._group.ranks else self._tries - is_first
        # A loop's first micro-batch may have no units: on one rank, the next one is tested.
        self.is_due = self._is_free and self._tries > 0 and self._more > 0
        self._more -= 1
        AdditivityResult(findings).refuse(self._off, on_another_rank=sums[0] > 0)

    # ------------------------------------------------------------ what could not be run

    def _tell(self, why: str) -> None:
        """Say once that the loss was not tested: a test that told nothing is made again."""
        _log.log(logging.DEBUG if self._has_told else logging.WARNING, _NOT_TESTED, why)
        self._has_told = True

    def _without_doubtful(
        self, findings: Sequence[AuditFinding], data: WindowData
    ) -> list[AuditFinding]:
        """Return the findings, without those that hold for parts alone, where none are trained on.

        Their rows may be no samples, and a count that it holds is not theirs.
        """
        doubtful = [finding for finding in findings if finding.kind in _OF_PARTS]
        if not doubtful or data.is_split_by_us:
            return list(findings)
        begin = doubtful[0].advice.partition(", so wholebatch")[0].partition(". Count")[0]
        self._tell(f"{begin}. wb.verify compares whole updates")
        return [finding for finding in findings if finding not in doubtful]

    def _not_testable(
        self,
        error: Exception,
        run: Callable[[Any], Any],
        data: WindowData,
        layout: Layout,
        outputs: bool,
    ) -> list[AuditFinding]:
        """Refuse a loss that runs on a micro-batch, but not on a part of it.

        What cannot be refused is logged, if the step itself will not raise it. An error that does
        not come again on a part is the user's own, and is raised.
        """
        is_free = self._is_free and bool(data.micros)
        if is_free and not self._runs(run, data.micros[0], is_loss=not outputs):
            if data.is_split_by_us:
                _log.warning(
                    "the loss function failed on a micro-batch. If the batch has a leaf that is "
                    "not a value per sample (class weights), name it: "
                    "micro_batch=wb.samples(..., static=...)"
                )
            return []  # The step will raise it.
        is_refused = isinstance(error, WholebatchError)
        parts = ([0], list(range(min(layout.size, 2))))
        if is_free and not is_refused and all(self._runs(run, layout.take(p)) for p in parts):
            raise error
        # A list of samples has no leaf that could be read wrongly: its loss may take one at a time.
        is_ours = data.is_split_by_us and not isinstance(data.batch, list)
        if is_refused or not is_free or not is_ours:
            why = f"a part of a micro-batch could not be run ({error!r})"
            self._tell(f"{why}. wb.verify compares whole updates")
            return []
        text = (
            f"it runs on a micro-batch, but not on another number of samples ({error!r}), so "
            "wholebatch cannot test if micro-batches add up to the batch. If the batch has a leaf "
            "that is not a value per sample, name it: micro_batch=wb.samples(8, static=...)"
        )
        return [AuditFinding("the loss function", type(error).__name__, "loss", text)]

    @torch.no_grad()
    def _runs(self, run: Callable[[Any], Any], few: Any, *, is_loss: bool = False) -> bool:
        """True if this runs on these samples, and returns a loss if it must; leave no trace."""
        try:
            with ForwardState(self._model, generators=own_generators(self._model, run)):
                result = run(few)
                if is_loss:
                    as_loss(result)
        except Exception:
            return False
        return True


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
        self._generators = [(each, state_of(each)) for each in own_generators(model, run)]
        # A spectral norm moves with every forward, and was warned of.
        is_still = not any(map(is_spectral_norm, model.modules()))
        first = self._value() if is_still else None
        again = None if first is None else self._value()
        self._first = None if again is None else first
        if first is not None and again is not None:
            # Some kernels, and generators of the user's own, give another number each time.
            self._allowed = max(10 * abs(again - first), 1e-6 * abs(first))

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
        own = [generator for generator, _ in self._generators]
        try:
            with ForwardState(self._model, generators=own):
                restore_random(self._random)
                for generator, state in self._generators:
                    set_state_of(generator, state)
                terms = terms_of(as_loss(self._run(copy.deepcopy(self._few))))
                total = sum(float(term.total) for term in terms.values())
        except Exception as problem:
            _log.debug("not tested if the loss moves within a window: %r", problem)
            return None
        finally:
            free_memory_of_test()
        return total if math.isfinite(total) else None
