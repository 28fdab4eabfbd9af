"""When to test that a loss adds up, on which samples, and on which ranks.

Entry points that run the forward have one `AdditivityTest`, and call it before every split window.
See `adds_up` for the test itself.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.batch.samples import Layout, Leaf, readable_layout, take
from wholebatch.coupled.adds_up import (
    SAMPLES,
    UNTESTED,
    AdditivityResult,
    check_adds_up,
    free_memory_of_test,
)
from wholebatch.coupled.causes import AuditFinding
from wholebatch.coupled.coupling_layers import refused_by_type
from wholebatch.coupled.last_reduction import last_reductions, step_division
from wholebatch.coupled.normalisation_layers import is_spectral_norm
from wholebatch.coupled.sample_runs import spread_rows
from wholebatch.distributed.sync_strategy import Sync
from wholebatch.errors import UnsupportedError, WholebatchError
from wholebatch.losses.loss import Loss, OfTheBatch, Terms, as_loss, terms_of
from wholebatch.warn_user import warn_user
from wholebatch.window.forward_state import (
    ForwardState,
    capture_random,
    own_generators,
    restore_random,
    set_state_of,
    state_of,
)
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

    def samples(self) -> Layout | None:
        """Return the batch, whose samples are tested; None if it cannot be taken apart."""
        return readable_layout(self.batch, **self.layout)

    def micro_sizes(self) -> list[int]:
        """Return the numbers of samples of the micro-batches; 1 where it is not known."""
        return [1 if one is None else one.size for one in map(self._layout, self.micros)]

    def micro_batch(self, turn: int) -> Layout | None:
        """Return a whole micro-batch, another one at each turn."""
        if not self.micros:
            return self.samples()
        return self._layout(self.micros[turn % len(self.micros)])

    def _layout(self, micro: Any) -> Layout | None:
        return readable_layout(micro, None, self.layout["static"])


@dataclass(frozen=True)
class _Plan:
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
        return int(
            min(self.layout.size, max(3, min(2 * self.micro, SAMPLES), self.micro), self.fits)
        )

    @property
    def most(self) -> int:
        return max(self.with_graph, self.without_graph)

    def fewer_tokens(self) -> Layout | None:
        """Return two samples with half of their tokens, which take the memory of one sample.

        Tokens are whole numbers of shape [samples, tokens]; all leaves of that length are cut.
        """
        values = [leaf.value for leaf in self.layout.leaves if leaf.batched]
        tensors = [value for value in values if isinstance(value, Tensor) and value.dim() > 1]
        ids = [t for t in tensors if t.dim() == 2 and not t.is_floating_point()]
        length = ids[0].shape[1] if ids else 0
        if length < 4:
            return None

        def cut(leaf: Leaf) -> Leaf:
            value = leaf.value
            if leaf.batched and isinstance(value, Tensor) and value.shape[1:2] == (length,):
                return replace(leaf, value=value[:, : length // 2])
            return leaf

        return replace(self.layout, leaves=tuple(map(cut, self.layout.leaves)))


class GatheredSamples:
    """Two samples of each micro-batch of a window, as one batch.

    A loop gives one micro-batch after the other. If each is homogeneous (sorted by length, one
    class), a mean over the wrong units adds up in all of them, and not over the window.
    """

    def __init__(self) -> None:
        self._taken: list[Layout] = []
        self._smallest = SAMPLES

    def add(self, micro: Any) -> None:
        """Copy the first and the last sample of a micro-batch."""
        layout = readable_layout(micro, None, ())
        if layout is not None:
            rows = sorted({0, layout.size - 1})
            taken = [
                replace(leaf, value=take(leaf.value, rows)) if leaf.batched else leaf
                for leaf in layout.leaves
            ]
            self._taken.append(replace(layout, size=len(rows), leaves=tuple(taken)))
            self._smallest = min(self._smallest, layout.size)

    def layout(self) -> Layout | None:
        """Return the samples as one batch; None if they have different shapes, or are too few."""
        count = max(3, min(2 * self._smallest, SAMPLES))
        number = min(len(self._taken), count)
        chosen = [self._taken[place] for place in spread_rows(len(self._taken), number)]
        if number < 2 or len({tuple(leaf.name for leaf in one.leaves) for one in chosen}) > 1:
            return None
        leaves = []
        for same in zip(*(one.leaves for one in chosen), strict=True):
            values = [leaf.value for leaf in same]
            if len({leaf.batched for leaf in same}) > 1:
                return None
            if not same[0].batched:
                leaves.append(same[0])
            elif all(isinstance(value, list) for value in values):
                leaves.append(replace(same[0], value=[item for one in values for item in one]))
            elif len({_row_of(value) for value in values} - {None}) == 1:
                leaves.append(replace(same[0], value=torch.cat(values)))
            else:
                return None
        size = sum(one.size for one in chosen)
        return replace(chosen[0], size=size, leaves=tuple(leaves))


def _row_of(value: Any) -> tuple[Any, ...] | None:
    """Return shape and dtype of a tensor's rows; None if it is no tensor."""
    return (value.shape[1:], value.dtype) if isinstance(value, Tensor) else None


def _parts_and_numbers(model: nn.Module) -> list[Any]:
    """Return what decides how a model computes, beside its weights: comparable, and held."""
    return [
        (
            module,
            [
                (name, one)
                for name, one in vars(module).items()
                if isinstance(one, (int, float, str))
            ],
            [len(one) for name, one in vars(module).items() if name.endswith("_hooks")],
        )
        for module in model.modules()
    ]


class AdditivityTest:
    """Tests in windows 1, 2, 4, 8, ... that the loss adds up over micro-batches.

    Its samples are spread over the batch. The first test takes up to 8 with their gradient, but
    never more than a micro-batch has. Later ones take as many as a micro-batch, forward only:
    couplings among many samples show there, and so do mistakes that depend on later data or
    weights. After a change of the model, or of what a graph reads, the first test is made again.
    A batch whose samples have no units tells nothing: the next window is tested then. A number of
    samples that ran out of memory is not tried again.

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
        given: nn.Module | None = None,
    ) -> None:
        self._given = given
        self._model, self._sync, self._off = model, sync, off
        self._ranks = 1 if sync is None else sync.ranks
        self._enabled, self._shares_forwards = enabled, shares_forwards
        self._windows = self._tests = 0
        self._tries = _TRIES  # of the first test
        self._as_tested: list[Any] | None = None  # what the first test has seen of the model
        self._has_changed, self._next_look = False, 0
        self._is_due = False
        self._unread_steps: Collection[int] = ()
        self._says_no_gradient = self._says_unreadable = True
        self._most: float = math.inf  # samples that fit into memory, as far as is known

    def begin_window(self, changed: bool = False) -> bool:
        """Count a window that is split; return True if it is to be tested.

        `changed`: graphs have noticed that the code reads another value than before.
        """
        self._windows += 1
        if self._ranks == 1 and self._is_another(changed):
            self._tries = 1
        due = self._tries > 0 or is_tested_window(self._windows)
        self._is_due = self._enabled and due
        return self._is_due

    def _is_another(self, changed: bool) -> bool:
        """True if the model or what its loss reads is another than at the first test.

        A value that is another one in every window (an annealed weight) is looked at after 1, 2, 4,
        8, ... windows.
        """
        self._has_changed |= changed
        if self._as_tested is None or self._windows < self._next_look:
            return False
        if not self._has_changed and self._as_tested == _parts_and_numbers(self._model):
            return False
        self._as_tested, self._has_changed = None, False
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
        divisions: list[str | None] = []

        def first(few: Any) -> Any:
            result = run(few)
            if not divisions and torch.is_grad_enabled():
                divisions.append(_division(result, samples.steps))
            return result

        found = refused_by_type(self._model)
        layout = samples.samples()
        if layout is None and self._says_unreadable:
            self._says_unreadable = False
            _log.warning(
                "the loss was not tested to add up over micro-batches: a %s cannot be taken apart "
                "into samples. Give a dict, a tuple or a dataclass of tensors, or run wb.verify",
                type(samples.batch).__name__,
            )
        result = AdditivityResult(conclusive=False)
        self._tests += 1
        if self._all(layout is not None and layout.size > 1 and self._most > 1):
            assert layout is not None
            sizes = samples.micro_sizes()
            is_part = layout.size < sum(sizes)  # a trainer's batches, of which it is one
            # Samples of several micro-batches may all be long ones: the smallest holds as many.
            smallest = layout.size if is_part else min(sizes[:-1] or sizes or [layout.size])
            plan = _Plan(layout, smallest, self._most)
            check = partial(
                check_adds_up,
                self._model,
                first if is_first else run,
                names_layers=self._ranks == 1 and not self._shares_forwards,
                outputs=outputs,
                name=name,
                micro_sizes=sizes[:-1],
                batch=layout,
                given=self._given,
            )
            try:
                result = self._compare(check, plan, is_first)
                for other in self._others(samples, layout, plan) if is_first else ():
                    if not (result.conclusive or result.findings):
                        result = check(other(), gradients=False)
            except torch.OutOfMemoryError:
                self._most = plan.most // 2
                result = AdditivityResult()
                _log.warning(
                    "the loss was not tested to add up over micro-batches: %d samples ran out of "
                    "memory in the test, and are not tried again",
                    plan.most,
                )
            except Exception as error:  # most often the loss's own, and the step will raise it
                found += self._not_testable(error, run, samples, outputs)
            result = self._without_doubtful(result, samples)
            free_memory_of_test()  # Not earlier: an error holds the tensors of its frames.
            if is_part and self._ranks == 1 and not (self._shares_forwards or outputs):
                gathered = GatheredSamples()
                for micro in samples.micros:
                    gathered.add(micro)
                found += self._over_micro_batches(run, gathered, layout)
        if is_first and not divisions:  # no graph was made: the step's own is read
            self._unread_steps = samples.steps
        self._end((*found, *result.findings), result.conclusive)
        for division in divisions:
            if division is not None:
                warn_user(division)
        if not self._tries and self._ranks == 1:
            self._as_tested = _parts_and_numbers(self._model)

    def _others(
        self, samples: WindowData, layout: Layout, plan: _Plan
    ) -> Sequence[Callable[[], Layout | None]]:
        """Return more samples to compare, where the first ones tell nothing, on one rank.

        One part of them may have no units: other samples, in another order, have some. Eight
        samples may have none, where a micro-batch has some.
        """
        if self._ranks > 1:
            return ()
        rows = list(reversed(range(layout.size)))
        mixed = [row for start in range(3) for row in rows[start::3]][: plan.without_graph]
        return (
            lambda: readable_layout(layout.take(mixed), **samples.layout),
            lambda: samples.micro_batch(self._tests - 1),
        )

    def _compare(
        self, check: Callable[..., AdditivityResult], plan: _Plan, is_first: bool
    ) -> AdditivityResult:
        """Compare samples with their parts: with a graph, no more of them than a micro-batch."""
        if not is_first or self._shares_forwards:
            return check(plan.layout, count=plan.without_graph, gradients=False)
        losses = min(plan.without_graph, SAMPLES)
        if self._ranks > 1:  # equally often on all of them, whatever is found: their losses meet
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
        shorter = plan.fewer_tokens()
        if shorter is not None:
            with suppress(RuntimeError, ValueError, IndexError):  # It needs all of its tokens.
                return check(shorter, count=2, batch=shorter)
        if self._says_no_gradient:
            self._says_no_gradient = False
            _log.info(
                "micro-batches of one sample: the test of the loss compared losses, not "
                "gradients (wb.verify compares whole updates)"
            )
        return whole

    def test_gathered(
        self, run: Callable[[Any], Any], gathered: GatheredSamples, micro: Any
    ) -> None:
        """Refuse a loss that does not add up over the micro-batches of a window, forward only.

        `micro` is one of them: neighbours that belong together are found in it.
        """
        found = self._over_micro_batches(run, gathered, readable_layout(micro, None, ()))
        AdditivityResult(tuple(found)).refuse(self._off)

    def _over_micro_batches(
        self, run: Callable[[Any], Any], gathered: GatheredSamples, batch: Layout | None
    ) -> list[AuditFinding]:
        layout, result = gathered.layout(), AdditivityResult()
        try:
            if layout is not None and layout.size <= self._most:
                result = check_adds_up(self._model, run, layout, gradients=False, batch=batch)
        except torch.OutOfMemoryError:
            self._most = 1 if layout is None else layout.size // 2
        except Exception as error:  # samples of different micro-batches do not go together
            _log.debug("samples of a window's micro-batches were not run together: %r", error)
        free_memory_of_test()
        return [one for one in result.findings if one.kind not in UNTESTED]

    def _without_doubtful(self, result: AdditivityResult, samples: WindowData) -> AdditivityResult:
        """Return the result without what could not be run, where the rows may be no samples.

        What acc.run and a trainer are given is split by no rule of ours: it may be a graph of
        nodes.
        """
        doubtful = [one for one in result.findings if one.kind == "unrunnable"]
        if not doubtful or len(samples.micros) > 1:
            return result
        _log.warning(
            "the loss was not tested to add up over micro-batches: %s",
            doubtful[0].advice.partition(", so wholebatch")[0]
            + ". wb.verify compares whole updates",
        )
        return AdditivityResult(tuple(one for one in result.findings if one not in doubtful))

    def read(self, loss: Loss | Terms) -> None:
        """Warn of a first loss that is divided by the number of steps; the test made no graph."""
        if self._unread_steps:
            found, self._unread_steps = _division(loss, self._unread_steps), ()
            if found is not None:
                warn_user(found)

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
                if len(samples.micros) > 1:
                    _log.warning(
                        "the loss function failed on a micro-batch. If the batch has a leaf that "
                        "is not a value per sample (class weights), name it: "
                        "micro_batch=wb.samples(..., static=...)"
                    )
                return []  # The step will raise it.
            if self._passes_again(error, run, samples):
                raise error
        # What acc.run and a trainer are given may be split by no rule of ours: a graph of nodes.
        # A list of samples has no leaf that could be read wrongly: its loss may take one at a time.
        is_ours = len(samples.micros) > 1 and not isinstance(samples.batch, list)
        if isinstance(error, WholebatchError) or not is_alone or not is_ours:
            _log.warning(
                "the loss was not tested to add up over micro-batches: a part of a micro-batch "
                "could not be run (%r). wb.verify compares whole updates",
                error,
            )
            return []
        text = (
            f"it runs on a micro-batch, but not on another number of samples ({error!r}), so "
            "wholebatch cannot test if micro-batches add up to the batch. If the batch has a leaf "
            "that is not a value per sample, name it: micro_batch=wb.samples(8, static=...)"
        )
        return [AuditFinding("the loss function", type(error).__name__, "loss", text)]

    def _passes_again(
        self, error: Exception, run: Callable[[Any], Any], samples: WindowData
    ) -> bool:
        """True if an error does not come again on a part: the user's own, which must be raised."""
        layout = samples.samples()
        if layout is None or isinstance(error, WholebatchError):
            return False
        count = min(layout.size, 2)
        for rows in ([0], list(range(count))):
            try:
                with ForwardState(self._model):
                    run(layout.take(rows))
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


def _division(loss: Any, steps: Collection[int]) -> str | None:
    """Return a warning of a loss that is divided by the number of steps, or None."""
    if not isinstance(loss, Loss | Terms) or isinstance(loss, OfTheBatch):
        return None
    read = (
        step_division(last_reductions(term.total), term.units, steps)
        for term in terms_of(loss).values()
    )
    return next((found for found in read if found is not None), None)
