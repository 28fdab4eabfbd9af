"""`watch`: a verdict on any training loop, while it runs.

The windows are recorded: the first ones in full, later ones by a few numbers of every gradient. At
the end of the watch they are judged. With several ranks, the records of all are gathered once, at
the end, and every rank judges them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as counter
from typing import Any

import torch
from torch import nn

from wholebatch.distributed.process_group import all_meet, of_all_ranks, world_size
from wholebatch.errors import OptionError
from wholebatch.verification.evidence import Counts, WindowEvidence
from wholebatch.verification.findings import STEPPED_TWICE, Finding, micro_batches
from wholebatch.verification.judge import are_of_two_losses, judge
from wholebatch.verification.verdicts import (
    DIFFERENT,
    NOT_JUDGED,
    RIGHT,
    LoopTrial,
    LoopVerdict,
    Watched,
    consistent,
)
from wholebatch.verification.window_recorder import WindowRecorder

_log = logging.getLogger("wholebatch")

PATIENCE = 30.0
"""Seconds that a rank waits for the others at the end of a watch."""
WITHOUT_LOADER = 8
"""Windows that are watched of a script without a DataLoader, whose end is not known."""

_NO_BACKWARD = "an optimizer step was seen, but no backward before it"
_numbers = counter()


class WatchIsOver(BaseException):
    """Ends a script whose verdict is known; no `except Exception` of the script's catches it."""


@dataclass(frozen=True)
class _Records:
    """The records of one rank."""

    windows: list[WindowEvidence]
    counts: dict[int, int]
    names: dict[int, str]
    left: int
    """Backwards after the last step."""
    unused: int
    """Batches at the end of the data that no backward came from."""
    unstepped: list[str]
    stepped_twice: bool
    reason: str
    """The reason why there is nothing to judge."""


class Watch:
    """Watches the loop that runs within it; `verdict` is the answer, after it has ended."""

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Any = None,
        *,
        name: str = "the loop",
        windows: int | None = 0,
        logs: bool = True,
        why_nothing: Callable[[], str] = lambda: "",
    ) -> None:
        """`windows` ends the loop after so many; None: after the first epoch; 0: it runs on.

        `why_nothing()` tells why a script may not have trained.
        """
        inner = optimizer
        while isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):
            inner = inner.optimizer  # of Accelerate, Fabric or Lightning
        if model is not None and not isinstance(model, nn.Module):
            raise OptionError(f"model={type(model).__name__}: must be an nn.Module")
        if inner is not None and not isinstance(inner, torch.optim.Optimizer):
            raise OptionError(f"optimizer={type(optimizer).__name__}: must be a torch optimizer")
        self._recorder = WindowRecorder(
            model, inner, stepped=self._stepped, pass_begins=self._pass_begins
        )
        self._name, self._windows, self._logs = name, windows, logs
        self._number, self._is_given = next(_numbers), inner is not None
        self._why_nothing = why_nothing
        self._began, self._is_ending = 0.0, False
        self._verdict: LoopVerdict | None = None

    def __enter__(self) -> Watch:
        self._began = time.perf_counter()
        self._recorder.__enter__()
        return self

    def __exit__(self, kind: Any, error: object, *_: object) -> None:
        self._recorder.__exit__()
        try:
            verdict = self._judged(kind, error)
        except Exception as failed:  # a watch never ends somebody's training
            _log.debug("the watch could not judge", exc_info=True)
            reason = f"the watch failed: {type(failed).__name__}: {failed}"
            verdict = self._make([_not_judged("", reason)])
        self._verdict = verdict
        if kind is None and self._logs:
            _log.log(logging.INFO if verdict.same else logging.WARNING, "%s", verdict.line)

    @property
    def verdict(self) -> LoopVerdict:
        """The verdict; inside the watch, on what was seen so far on this rank."""
        if self._verdict is not None:
            return self._verdict
        return self._make(_trials([self._records(is_over=False)], is_given=self._is_given))

    def next_window(self, units: Sequence[float]) -> bool:
        """Give the units of the next window; False if micro-batches wait for a step."""
        self._recorder.units = tuple(units)
        return not self._recorder.pending

    def _stepped(self) -> None:
        """End the loop at its next backward, where it has been watched for long enough."""
        recorder, windows = self._recorder, max(self._recorder.window_counts.values(), default=0)
        is_over = self._is_ending
        if self._windows:
            is_over = windows >= self._windows
        elif self._windows is None and not recorder.passes.are_known:
            is_over = windows >= WITHOUT_LOADER
        if is_over:
            recorder.over = WatchIsOver()

    def _pass_begins(self) -> None:
        """End the loop after its first pass over the training data: before it evaluates, or begins
        again. Micro-batches that wait for a step are watched until that comes.
        """
        recorder = self._recorder
        if self._windows is None and recorder.passes.has_ended:
            self._is_ending = True
            if not (recorder.pending or recorder.open_ledger):
                recorder.over = WatchIsOver()
                raise recorder.over

    # ------------------------------------------------------------- the verdict

    def _records(self, *, is_over: bool) -> _Records:
        recorder = self._recorder
        # Backwards that are made in another way are of another purpose: a Hessian's estimate.
        windows = [window.backwards for window in recorder.windows]
        known = [micro for row in windows if not are_of_two_losses(row) for micro in row[:1]]
        left = recorder.pending if is_over or not windows else []
        left = [
            micro
            for micro in left
            if not known or not all(are_of_two_losses([micro, other]) for other in known)
        ]
        return _Records(
            windows=list(recorder.windows),
            counts=dict(recorder.window_counts),
            names=recorder.optimizer_names,
            # After an overflow a loss scaler has skipped the step: nothing is left.
            left=len(left) * (not recorder.overflowed) + recorder.open_ledger * is_over,
            unused=recorder.passes.unused if is_over else 0,
            unstepped=recorder.unstepped,
            stepped_twice=recorder.stepped_twice,
            reason=recorder.failure or self._nothing_seen(len(left)),
        )

    def _judged(self, kind: Any, error: object) -> LoopVerdict:
        records = self._records(is_over=kind is None)
        if world_size() > 1 and not all_meet(f"watch {self._number}", PATIENCE):
            reason = f"not every rank came to the end of the watch within {PATIENCE:g} s"
            return self._make([_not_judged("", reason)])
        trials = _trials(of_all_ranks(records), is_given=self._is_given)
        is_end = isinstance(error, SystemExit) and not error.code
        ended = ""
        if kind not in (None, WatchIsOver) and not is_end:
            text = " ".join(str(error).split())
            ended = f"the loop ended with {kind.__name__}{': ' * bool(text)}{text}"
        return self._make(trials, ended)

    def _make(self, trials: Sequence[LoopTrial], error: str = "") -> LoopVerdict:
        recorder = self._recorder
        watched = Watched(
            windows=max(recorder.window_counts.values(), default=0),
            end=recorder.passes.has_ended if recorder.passes.are_known else None,
            not_judged=tuple(recorder.unstepped),
            trainer=recorder.trainer,
            error=error,
            other_optimizers=tuple(recorder.other_optimizers.values()),
        )
        return LoopVerdict(
            self._name,
            consistent(trials),
            world_size(),
            time.perf_counter() - self._began,
            watched,
        )

    def _nothing_seen(self, left: int) -> str:
        """Return the reason why there is no window to judge."""
        recorder = self._recorder
        if recorder.stepped_inside:
            return "an optimizer steps inside the backward, on one parameter after the other"
        if recorder.rows.is_sharded or recorder.steps_on_copies:
            return (
                "the optimizer steps on shards or copies of the parameters (FSDP2, ZeRO), whose "
                "gradients the watch does not see: use wb.Accumulator, whose units and weights "
                "are known, or wb.verify"
            )
        if left:
            number = f"{left} backward{'' if left == 1 else 's'}"
            return (
                f"{number} without a torch optimizer's step after them: put one window into a "
                "function and use `wholebatch verify train.py:function`"
            )
        if recorder.lost_steps:
            return _NO_BACKWARD
        if self._why_nothing():
            return self._why_nothing()
        return (
            "no backward was seen in this process. A script must train, and a recipe must have "
            "model(), data() and loss(). To judge a function that trains one window, use "
            "`wholebatch verify FILE.py:FUNCTION`. If the script starts other processes, use "
            "torchrun instead"
        )


def _not_judged(name: str, reason: str) -> LoopTrial:
    return LoopTrial(name).with_answer(NOT_JUDGED, reason)


def _trials(records: Sequence[_Records], *, is_given: bool) -> list[LoopTrial]:
    """Judge what all ranks have recorded; of the optimizer that was given, if it has stepped."""
    trials: list[LoopTrial] = []
    stepped = [optimizer for optimizer, count in records[0].counts.items() if count]
    if is_given and 0 in stepped:  # the optimizer that was given is the first that is known
        stepped = [0]
    for optimizer, name in sorted(records[0].names.items()):
        if optimizer in stepped:
            windows = [[w for w in rank.windows if w.optimizer == optimizer] for rank in records]
            prefix = f"{name} {optimizer + 1}, " if len(stepped) > 1 else ""
            trials += _of_optimizer(windows, prefix)
    if any(rank.stepped_twice for rank in records):
        trials.append(_wrong("between two windows", STEPPED_TWICE))
    left = max(rank.left for rank in records)
    if trials and left:
        number = f"{micro_batches(left)} after the last optimizer step"
        trials.append(_wrong("after the last step", Finding("no-update", number)))
    unused = max(rank.unused for rank in records)
    if trials and unused and not left:
        number = f"{unused} batch{'' if unused == 1 else 'es'} at the end of the data without one"
        trials.append(_wrong("after the last backward", Finding("no-update", number)))
    return trials or [_not_judged("the loop", records[0].reason)]


def _wrong(name: str, finding: Finding) -> LoopTrial:
    return LoopTrial(name).with_answer(DIFFERENT, findings=[finding])


def _of_optimizer(ranks: Sequence[Sequence[WindowEvidence]], prefix: str) -> list[LoopTrial]:
    """Judge the windows of one optimizer."""
    by_number = [{w.number: w for w in row if w.backwards or w.ledger} for row in ranks]
    if not any(by_number):
        return [_not_judged(prefix, _NO_BACKWARD)]
    shared = sorted(set.intersection(*map(set, by_number)))
    if not shared:
        return [_not_judged(prefix, "the ranks have made different steps")]
    every = [window for row in by_number for window in row.values()]
    of_one_pass = [w for w in every if len({micro.loader_pass for micro in w.backwards}) < 2]
    counts = Counter(len(window.backwards) for window in of_one_pass or every)
    usual = max(counts, key=lambda count: (counts[count], count))
    first = len(by_number[0][shared[0]].backwards)
    trials: list[LoopTrial] = []
    own: dict[Hashable, tuple[float, ...]] = {}
    for number in shared:
        window = [row[number] for row in by_number]
        count = max(len(evidence.backwards) for evidence in window)
        numbers = Counts(count, usual, first, len(ranks), number)
        trial = judge(window, numbers, f"{prefix}window {number}", own)
        if count == 1 == number and trial.answer == RIGHT and _is_off_by_one(by_number[0], shared):
            variant = f"the first window has 1 micro-batch, all others {usual}"
            trial = trial.with_answer(DIFFERENT, findings=[Finding("only-the-first", variant)])
        trials.append(trial)
    return trials


def _is_off_by_one(windows: Mapping[int, WindowEvidence], numbers: Sequence[int]) -> bool:
    """True if the first window alone has one micro-batch, and it is no tail of its data."""
    first, *later = (windows[number].backwards for number in numbers)
    full = [micros for micros in later if len(micros) > 1]
    is_tail = not full or full[0][0].loader_pass != first[0].loader_pass
    return len(first) == 1 and not is_tail and len(later[0]) > 1 and len(full) >= len(later) - 1


def watch(model: nn.Module | None = None, optimizer: Any = None) -> Watch:
    """Watch a training loop, and judge if it makes the update of the undivided batch.

    >>> import torch, wholebatch as wb
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with wb.watch(model, optimizer) as watched:           # your loop, or trainer.train()
    ...     for x in torch.randn(4, 5, 3):
    ...         model(x).square().mean().backward()           # never divided by 4
    ...     optimizer.step()
    >>> watched.verdict.mistake.name
    'not divided'

    The first window is recorded in full: its micro-batches, the weight and units of each loss, and
    the gradient that reached the step. Later windows are recorded by a few numbers. Units that the
    loop gives to `Accumulator.backward` are taken as given, and the verdict says so. The loop and
    its numbers do not change. If one run does not show whether the update is right, the verdict is
    "not judged", with the reason.

    Args:
        model: The model, wrapped or not. Default: what the loop calls.
        optimizer: The optimizer to judge. Default: all that step on the model's parameters.

    Returns:
        A context manager with a `verdict`: true if the update is the same.
    """
    return Watch(model, optimizer)
