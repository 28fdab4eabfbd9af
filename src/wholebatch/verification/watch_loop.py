"""`watch`: a verdict on any training loop, while it runs.

The first window is recorded and judged inside its optimizer step. The next one tells if gradients
were left behind. After that only the losses are read: a short window may be divided wrongly, and
the last micro-batches of the data may never make an update.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from itertools import count as counter
from typing import Any

import torch
from torch import nn

from wholebatch.distributed.process_group import all_meet, largest_over_ranks, world_size
from wholebatch.errors import OptionError
from wholebatch.verification.loop_judge import LoopJudge
from wholebatch.verification.loss_weights import TermWeights
from wholebatch.verification.mistakes import NOT_JUDGED, RIGHT, STEPPED_TWICE, MistakeFit
from wholebatch.verification.verdicts import LoopTrial, LoopVerdict
from wholebatch.verification.window_recorder import RecordedWindow, WindowRecorder, filled

_log = logging.getLogger("wholebatch")

_SHORT = ("stepped-every-micro-batch", "nominal-count", "divided-twice", "left-out")
"""The mistakes that a short first window can be taken for: it has fewer micro-batches than K."""

_MOST_PLAYERS = 12
"""Windows that are watched until each of several optimizers has had its turn."""


_PATIENCE, _LATER_PATIENCE = 30.0, 2.0
"""Seconds that a rank waits for the others at their first step, and at a later one."""

_UNKNOWN, _NOTHING, _LONGER, _LATER, _WHOLE = range(-1, 4)
"""What a rank wants to do with a window; `_plan` makes one answer of those of all ranks."""

_numbers = counter()


class WatchIsOver(BaseException):
    """Ends a script whose verdict is known; no `except Exception` of the script's catches it."""


class Watch:
    """Watches the loop that runs within it; `verdict` is the answer."""

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Any = None,
        *,
        name: str = "the loop",
        stop_after: int = 0,
        logs: bool = True,
    ) -> None:
        inner = optimizer
        while isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):
            inner = inner.optimizer  # of Accelerate, Fabric or Lightning
        if model is not None and not isinstance(model, nn.Module):
            raise OptionError(f"model={type(model).__name__}: must be an nn.Module")
        if inner is not None and not isinstance(inner, torch.optim.Optimizer):
            raise OptionError(f"optimizer={type(optimizer).__name__}: must be a torch optimizer")
        self._recorder = WindowRecorder(model, optimizer=inner, ended=self._ended)
        self._recorder.began = self._began
        self._name, self._stop_after, self._logs = name, stop_after, logs
        self._trials: list[LoopTrial] = []
        self._windows = self._rounds = self._count = 0
        self._judged: set[frozenset[int]] = set()
        self._first: LoopJudge | None = None
        self._has_short = self._has_others = self._is_alone = False
        self._number = next(_numbers)
        self.seconds = 0.0
        """Seconds that recording and judging have taken beside the first window's own."""

    def __enter__(self) -> Watch:
        self._recorder.__enter__()
        return self

    def __exit__(self, kind: Any, error: object, *_: object) -> None:
        left = self._recorder.window
        self._recorder.__exit__()
        is_known = not self._has_others and not self._recorder.failure and not self._recorder.over
        is_known &= left is None or self._is_of_the_loop(left)
        if kind is None and left is not None and self._windows and is_known:
            judge = LoopJudge(left, self._recorder, "after the last step")
            self._trials.append(judge.told("no-update", "no optimizer step after them"))
        nothing = LoopJudge(self._recorder.new_window(), self._recorder, "between two windows")
        if self._recorder.stepped_twice:
            self._trials.append(nothing.told(*STEPPED_TWICE))
        if self._recorder.left_behind:
            variant = "an optimizer steps on gradients of the window before, too"
            self._trials.append(nothing.told("never-cleared", variant))
        if not self._trials:
            reason = self._recorder.failure or self._nothing_seen(left)
            self._trials.append(nothing.not_judged(reason))
        is_end = isinstance(error, SystemExit) and not error.code
        if kind not in (None, WatchIsOver) and not is_end:
            ended = f"the loop ended with {kind.__name__}" + f": {error}" * bool(str(error))
            self._trials[-1] = replace(self._trials[-1], notes=(*self._trials[-1].notes, ended))
        verdict = self.verdict
        if kind is None and self._logs:
            _log.log(logging.INFO if verdict.same else logging.WARNING, "%s", verdict.line)

    @property
    def verdict(self) -> LoopVerdict:
        """The verdict on what was seen so far."""
        dtypes = {torch.bfloat16: "bf16", torch.float16: "fp16"}
        precision = next((dtypes[d] for d in self._recorder.autocast if d in dtypes), "full")
        trials = tuple(self._trials)
        return LoopVerdict(self._name, trials, precision, world_size(), self.seconds)

    def _is_of_the_loop(self, left: RecordedWindow) -> bool:
        """False if the last backwards have other weights and were cleared: a Hessian's estimate."""
        grads = [p.grad for p in self._recorder.parameters if p.grad is not None]
        if self._first is None or any(bool(grad.any()) for grad in grads):
            return True
        first, last = ([(t.times, t.over) for t in w.micros[0].terms] for w in (self._first, left))
        return first == last

    def _nothing_seen(self, left: RecordedWindow | None) -> str:
        """Return the reason why there was no window to judge."""
        if left is None and self._recorder.optimizer_steps:
            return "an optimizer step was seen, and no backward that brought its gradients"
        if left is None:
            return "no backward was seen in this process; if it starts others, use torchrun instead"
        count = len(left.micros)
        reason = f"{count} backward{'s'[: count - 1]} without a torch optimizer's step after them"
        if any(micro.moved for micro in left.micros):
            reason += ": the loop updates the weights by itself, with a rate that is not known"
        return reason

    # ------------------------------------------------------------ called by the observer

    def _began(self, window: RecordedWindow) -> None:
        """Go on lightly after the first window, unless the next begins with its gradients."""
        returns = self._windows > _MOST_PLAYERS or self._returns(window)
        is_clean = not float(window.micros[0].before.abs().sum())
        if window.moved_before and self._windows == 1:
            judge = LoopJudge(self._recorder.new_window(), self._recorder, "between two windows")
            variant = "after the first step, before the next forward"
            self._trials.append(judge.told("moved-beside-the-step", variant))
        more, is_known = self._rounds - self._stop_after, self._count > 1 and is_clean
        if returns and self._stop_after and (more > 0 or (more == 0 and is_known)):
            self._recorder.over = WatchIsOver()
            raise self._recorder.over
        if self._first is not None and window.micros[0].is_passed_on:  # a generator's loss
            self._has_others |= not self._first.micros[0].is_passed_on
        if returns and not self._recorder.light and (is_known or self._rounds > 1):
            self._recorder.go_lightly()

    def _returns(self, window: RecordedWindow) -> bool:
        """True if the optimizer of the first window has its turn again, and each other had one."""
        if self._first is None or self._recorder.light:
            return True
        first, now = (filled(w.micros[0].brought, w.sizes) for w in (self._first.window, window))
        return not self._recorder.waits_for_others and (first == now or len(self._judged) < 2)

    def _ended(self, window: RecordedWindow) -> None:
        self._windows += 1
        began = time.perf_counter()
        judge = LoopJudge(window, self._recorder, f"window {self._windows}")
        try:
            self._judge(judge)
        except Exception as error:  # a watch never ends somebody's training
            _log.debug("a window was not judged", exc_info=True)
            reason = f"the watch failed: {type(error).__name__}: {error}"
            self._trials.append(judge.not_judged(reason))
        if self._windows == 1:
            self.seconds = time.perf_counter() - began

    def _judge(self, judge: LoopJudge) -> None:
        window, plan = judge.window, self._plan(judge)
        is_first = self._first is None or window.places == self._first.window.places
        self._rounds += self._recorder.light or is_first
        if plan == _WHOLE:
            self._judged.add(window.places)
            trial = judge.trial()
            self._trials.append(trial)
            if self._first is None:
                self._first = judge
                self._count = trial.micro_batches
            elif is_first and self._count < trial.micro_batches:
                self._was_short(judge.terms(), trial.micro_batches)
        elif plan == _LONGER:
            self._was_short(judge.terms(), len(judge.micros))
        elif plan == _LATER:
            self._judge_later(judge)

    def _judge_later(self, judge: LoopJudge) -> None:
        """Judge a window that is shorter, or divided otherwise, or has smaller micro-batches."""
        assert self._first is not None
        is_short = bool(largest_over_ranks(len(judge.micros) < self._count))
        if is_short:
            judge.steps, judge.like = self._count, self._first.terms()
        if largest_over_ranks(not judge.window.is_whole):  # only its losses' weights are known
            if largest_over_ranks(any(abs(sum(t.weights) - 1) > 1e-3 for t in judge.like)):
                return
            judge.window.sizes, judge.micros[0].calls = [], []
        trial = judge.trial()
        if judge.was_right and trial.found == "cleared-in-the-window":
            return
        self._has_short |= is_short or judge.was_right
        self._trials += [trial] * (trial.found != NOT_JUDGED)

    def _plan(self, judge: LoopJudge) -> int:
        """Return what is done with this window, on all ranks."""
        patience = _LATER_PATIENCE if self._first else _PATIENCE
        if not self._is_alone and not all_meet(f"{self._number}/{self._windows}", patience):
            self._is_alone = True
            if self._first is None:
                reason = f"not every rank has made a step {patience:g} s after the first one did"
                self._trials.append(judge.not_judged(reason))
        if self._is_alone:
            return _NOTHING
        own = self._own_plan(judge)
        least, most = -largest_over_ranks(-own), largest_over_ranks(own)
        agreed = least > _UNKNOWN and (least == most or most < _WHOLE)
        return int(most) if agreed else _NOTHING

    def _own_plan(self, judge: LoopJudge) -> int:
        window, count, first = judge.window, len(judge.micros), self._first
        if window.is_whole and not self._recorder.light:  # the first, or it began with gradients
            is_clean = not bool(window.micros[0].before.any())
            waits = window.places in self._judged and self._count > 1 and is_clean
            return _NOTHING if waits else _WHOLE  # another optimizer has not had its turn yet
        is_hidden = self._has_others or self._recorder.sharded or len(self._judged) > 1
        if first is None or first.needs_calls or is_hidden:
            return _UNKNOWN  # forwards are not watched any more, nor whose window it is
        is_other = world_size() == 1 and self._is_divided_otherwise(judge)
        if is_other and not window.is_whole:
            return _NOTHING
        if is_other or self._is_uneven(judge) or (count < self._count and not self._has_short):
            return _LATER
        return _LONGER if count > self._count == len(first.window.micros) else _NOTHING

    def _is_divided_otherwise(self, judge: LoopJudge) -> bool:
        """True if it is divided by the number of the first window, and not by its own.

        Sums tell this, and the means of a longer window; a shorter one is judged in any case.
        """
        if self._has_short or self._first is None or self._trials[0].found != RIGHT:
            return False
        judge.like, scale = self._first.terms(), judge.micros[0].loss_scale
        plain = all(len(micro.roots) == 1 for micro in self._first.micros)  # a backward of each
        longer = plain and len(judge.micros) > self._count
        sums = [
            sum(term.weights) / scale
            for term, was in zip(judge.terms(), judge.like, strict=False)
            if was.choice is not None
            or (longer and term.choice is None and abs(sum(was.weights) / scale - 1) < 1e-2)
        ]
        judge.was_right = any(abs(total - 1) > 1e-2 for total in sums)
        judge.like, judge.steps = (judge.like, self._count) if judge.was_right else ((), None)
        return judge.was_right

    def _is_uneven(self, judge: LoopJudge) -> bool:
        """True if a full window has a smaller micro-batch, and those of the first were equal."""
        first, *more = self._trials
        if more or len(judge.micros) != self._count or world_size() > 1 or first.found != RIGHT:
            return False
        return len(set(first.units)) == 1 and any(len(set(t.units)) > 1 for t in judge.terms())

    def _was_short(self, like: list[TermWeights], count: int) -> None:
        """Judge the first window again: those that follow are longer, and tell more."""
        assert self._first is not None
        first, self._count = self._first, count
        first.steps, first.like, first.runs_undivided = count, like, False
        trial = first.trial()
        alone, resumed = trial.micro_batches == 1, first.window.resumed
        each = any(other.found == "stepped-every-micro-batch" for other in self._trials[1:])
        if trial.found in _SHORT and not each and (alone or resumed or trial.found != "left-out"):
            left = any(other.found == "cleared-in-the-window" for other in self._trials[1:])
            key = "left-out" if left else "nominal-count"
            key = "only-the-first" if alone else "lost-after-resume" if resumed else key
            fits = [MistakeFit(key, fit.variant, fit.distance, True) for fit in trial.fits[:1]]
            trial = replace(trial, found=key, fits=(*fits, *trial.fits[1:]))
        self._trials[0] = trial


def watch(model: nn.Module | None = None, optimizer: Any = None) -> Watch:
    """Watch any training loop and tell if it makes the update of the undivided batch.

    >>> import torch, wholebatch as wb
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with wb.watch(model, optimizer) as watched:           # your loop, or trainer.train()
    ...     for x in torch.randn(4, 5, 3):
    ...         model(x).square().mean().backward()           # never divided by 4
    ...     optimizer.step()
    >>> watched.verdict.mistake.name
    'not divided'

    The first window is recorded: its micro-batches, the weight and units of each loss, and the
    gradient that reached the step. The undivided batch is run beside it where its inputs can be
    joined. Nothing of the loop changes, and its numbers stay the same. After that window the watch
    costs next to nothing. Where something cannot be known, the verdict is "not judged", with the
    reason.

    Args:
        model: The model, wrapped or not. Default: what the loop calls first.
        optimizer: The optimizer. Default: the one that holds the model's parameters.

    Returns:
        A context manager with a `verdict`: true if the update is the same.
    """
    return Watch(model, optimizer)
