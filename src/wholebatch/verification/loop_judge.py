"""Judge one window of a loop: is it the update of the undivided batch, and if not, why.

The judge asks two questions. First, what did the loop do with the gradients of its backwards: are
all of them in the step, once, with one factor? Second, which weight did each loss give its
micro-batch? Both together are the weights of the micro-batches in the step, and right is `units /
all units`. What cannot be known is not judged, with a reason.

With several ranks, one judge has the windows of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, pairwise
from typing import Any

import torch
from torch import Tensor

from wholebatch.readable_sizes import percent
from wholebatch.verification.loss_weights import (
    LOSS_SCALE,
    Column,
    Reading,
    Unreadable,
    WindowNumbers,
    is_loss_scale,
    read_columns,
)
from wholebatch.verification.mistakes import (
    NOT_JUDGED,
    RIGHT,
    MistakeFit,
    WindowParts,
    apart,
    hypotheses,
    nearest,
    weightings,
)
from wholebatch.verification.run_comparison import TIMES_THE_FLOOR, fit_of
from wholebatch.verification.verdicts import GIVEN_UNITS, LoopTrial
from wholebatch.verification.window_recorder import (
    RecordedBackward,
    RecordedClip,
    RecordedWindow,
)

_NO_LIMIT = 1e6
"""Clipping to more than this is a way to measure a norm."""
_CONSTANT = ("not-divided", "divided-twice", "loss-scale", "nominal-count")
"""Mistakes by a constant factor, which all terms of a loss have."""
_WEIGHTS = 1e-3
"""Weights of losses that differ by less are the same."""


@dataclass
class LoopJudge:
    """Judges one window; `ranks` are the records of it, one of each rank, in micro-batches."""

    ranks: Sequence[RecordedWindow]
    name: str
    usual: int = 0
    """The number of micro-batches of most windows."""
    first: int = 0
    """The number of micro-batches of the first window."""
    case: str = "live"
    owns: Sequence[float] = ()
    """The weights that the terms of the loss have of their own, where another window tells."""

    def __post_init__(self) -> None:
        self.micros = [window.backwards for window in self.ranks]
        self.every = [micro for row in self.micros for micro in row]
        self.count = max((len(row) for row in self.micros), default=0)
        self.usual = self.usual or self.count
        self.notes: list[str] = []
        self.units: Sequence[float] = ()
        self.by = "gradients"
        self.off = math.inf  # how far wrong weights are from the right ones
        self.tolerance, self.floor = _WEIGHTS, max(window.eps for window in self.ranks)

    # ------------------------------------------------------------- the trial

    def trial(self) -> LoopTrial:
        """Return the verdict on the window."""
        if self.ranks[0].ledger_units:
            return self._of_the_ledger()
        if len({micro.signature for micro in self.every}) > 1:
            return self.not_judged(
                "the backwards of the window are of different losses (a GAN's, or tasks in turn): "
                "add the losses and call backward once, or use wb.verify"
            )
        if any(_begins_again(row) for row in self.micros):
            return self.not_judged(
                "gradients are cleared and weights are moved in the middle of the window (SAM, or "
                "another optimizer of two passes): use wb.verify"
            )
        seen = self._seen() or self._unsynchronised()
        if seen is not None:
            return self.told(seen)
        factors = self._factors()
        if isinstance(factors, MistakeFit):
            return self.told(factors)
        if isinstance(factors, str):
            return self.not_judged(factors)
        try:
            columns = read_columns([micro.terms for micro in self.every], self._numbers(factors))
        except Unreadable as unread:
            return self._unread(unread)
        if len(self.every) == 1:
            return self._of_one_micro_batch(columns)
        found = self._weigh(columns, factors)
        if isinstance(found, str):
            return self.not_judged(found)
        if found.key == RIGHT:
            found = beside(self.ranks) or self._clipped_early() or found
        doubt = self._doubt() if found.key == RIGHT else ""
        return self.not_judged(f"{doubt}: use wb.verify") if doubt else self.told(found)

    def _doubt(self) -> str:
        """Return the reason why weights that are right may not make the right update."""
        penalties = [[t for t in micro.terms if t.kind == "penalty"] for micro in self.every]
        numbers = [f for row in penalties for term in row for f in (*term.over, *term.times)]
        if any(penalties) and not any(map(self._is_count, numbers)):
            return (
                "a penalty on the weights comes with the losses, and is not divided by their number"
            )
        return next((window.doubt for window in self.ranks if window.doubt), "")

    def _of_the_ledger(self) -> LoopTrial:
        """Judge a window of wholebatch: its ledger has the units, and one factor for all."""
        self.units, self.by = tuple(chain(*(w.ledger_units for w in self.ranks))), "ledger"
        if any(window.are_units_given for window in self.ranks):
            self.by = GIVEN_UNITS
        if any(window.schedule_moved for window in self.ranks):
            return self.told(
                MistakeFit("scheduled-per-micro-batch", "the rate changed within the window")
            )
        return self.told(_right(0.0, True))

    def _numbers(self, factors: Sequence[float]) -> WindowNumbers:
        factor = factors[0] * len(self.ranks)
        same = all(math.isclose(one, factors[0], rel_tol=_WEIGHTS) for one in factors)
        return WindowNumbers(
            self.count, self.usual, len(self.ranks), factor if same and factor else 1.0
        )

    def _unread(self, unread: Unreadable) -> LoopTrial:
        if unread.coupled and self.count > 1:
            return self.told(MistakeFit("coupled", f"the loss: {unread.reason}"))
        return self.not_judged(
            f"the weight of the loss cannot be read: {unread.reason}. Use wb.verify, which runs "
            "the undivided batch, or give the units to wb.Accumulator"
        )

    def _of_one_micro_batch(self, columns: Sequence[Column]) -> LoopTrial:
        if self.usual == 1:
            nominal = max(column.divisor for column in columns)
            if nominal > 2:
                variant = f"the loss is divided by {nominal}"
                return self.told(MistakeFit("stepped-every-micro-batch", variant))
            return self.not_judged(
                "every update is made of one micro-batch, so nothing is accumulated; a loop that "
                "means to accumulate steps at every micro-batch"
            )
        if self.ranks[0].number == 1:
            variant = f"the first window has 1 micro-batch, others {self.usual}"
            return self.told(MistakeFit("only-the-first", variant))
        found = self._weigh(columns, [1 / len(self.ranks)] * len(self.every))
        return self.not_judged(found) if isinstance(found, str) else self.told(found)

    def trial_of(
        self,
        parts: WindowParts,
        floor: float,
        inputs: Sequence[Sequence[Any]],
        *,
        coupled: bool,
    ) -> LoopTrial:
        """Return the verdict on a window whose parts are known, with what rounding explains.

        `coupled` tells that the undivided batch is not the sum of its micro-batches.
        """
        self.floor, self.tolerance = floor, TIMES_THE_FLOOR * floor
        self.units = list(chain(*parts.units))
        seen = self._unsynchronised()
        if seen is not None:
            return self.told(seen)
        window = self.ranks[0]
        if window.gradient is None:
            return self.not_judged("the gradients of the step are not in `.grad`: use wb.verify")
        gradient, at_step = self._before_clip(window), self._at_step(window)
        off = apart(gradient, parts.right)
        fits = [_right(off, off <= self.tolerance)]
        cause = self._scaled_after_clip(at_step) if gradient is not at_step else None
        if off <= self.tolerance and cause is None:
            if coupled:
                cause = beside(self.ranks) or MistakeFit("coupled", "a layer mixes samples")
            cause = cause or beside(self.ranks) or self._clipped_early(uncut=True)
        elif cause is None and self.every:
            cause = self._lost(gradient)
        if cause is None and off > self.tolerance:
            tolerance = max(self.tolerance, TIMES_THE_FLOOR * self.floor)
            fits = nearest(hypotheses(parts, inputs), gradient, tolerance)
            cause = next((fit for fit in fits if fit.fits and fit.key != RIGHT), None)
        if cause is None and off > self.tolerance:
            cause = self._of_known_parts(gradient, parts.right) or beside(self.ranks)
        found = RIGHT if off <= self.tolerance else None
        last = self.micros[0][-1].after if self.micros[0] else gradient
        is_added = cause is None and apart(last, parts.right) <= self.tolerance
        if is_added and _parallel(gradient, parts.right, self.tolerance):
            # The loop itself shrinks a right gradient: it clips.
            found, fits = RIGHT, [_right(apart(last, parts.right), True)]
        if cause is not None:
            fits = [cause, *(fit for fit in fits if fit.key != cause.key)]
            found = cause.key
        return self._trial(found, fits)

    def _of_known_parts(self, gradient: Tensor, right: Tensor) -> MistakeFit | None:
        """Return the mistake of a gradient that no weighting of the micro-batches gives."""
        size = float(right @ right)
        factor = float(gradient @ right) / size if size else 0.0
        is_scaled = factor > 0 and apart(gradient, right * factor) <= self.tolerance
        if is_scaled and is_loss_scale(factor):
            return MistakeFit("loss-scale", f"{factor:g} times too large")
        off, window = apart(gradient, right), self.ranks[0]
        if window.is_half and off <= math.sqrt(window.eps) * TIMES_THE_FLOOR:
            return MistakeFit(
                "16-bit-accumulation", f"{percent(off)} of the sum is lost", off, True
            )
        return None

    # ------------------------------------------------------------- seen without weights

    def _seen(self) -> MistakeFit | None:
        """Return the mistake that is seen in the backwards, whatever they weigh."""
        if any(micro.is_repeated for micro in self.every):
            return MistakeFit("counted-twice", "two backwards of the same loss")
        for row in self.micros:
            zero = [i + 1 for i, m in enumerate(row) if {t.kind for t in m.terms} == {"zero"}]
            if zero:
                return MistakeFit("left-out", f"the loss of number {zero[0]} is multiplied by 0")
            scales = [micro.loss_scale for micro in row]
            if len(set(scales)) > 1:
                variant = f"from {scales[0]:g} to {scales[-1]:g} in the window"
                return MistakeFit("loss-scale", variant)
        return None

    def _unsynchronised(self) -> MistakeFit | None:
        """Return the mistake of ranks that clip, or step, each with a gradient of its own."""
        gradients = [window.gradient for window in self.ranks if window.gradient is not None]
        if len(gradients) < 2 or len(gradients) < len(self.ranks):
            return None
        limit = TIMES_THE_FLOOR * TIMES_THE_FLOOR * self.floor
        if any(apart(one, gradients[0]) > limit for one in gradients[1:]):
            return MistakeFit("unsynchronised-ranks", "each rank steps with another gradient")
        clips = [self._last_clips(window) for window in self.ranks]
        before = [row[-1].before for row in clips if row]
        if len(before) == len(clips) and any(apart(b, before[0]) > limit for b in before[1:]):
            variant = "each rank's own gradient, not their mean"
            return MistakeFit("clipped-too-early", variant)
        return None

    # ------------------------------------------------------------- on the way to the step

    def _factors(self) -> list[float] | MistakeFit | str:
        """Return the factor that each backward's gradient has in the step, a mistake or a doubt."""
        ranks, everywhere = len(self.ranks), [micro.contribution for micro in self.every]
        if any(window.gradient is None for window in self.ranks):
            self.by = "weights of the losses"
            return [1 / ranks] * len(everywhere)
        gradient, at_step = self._before_clip(self.ranks[0]), self._at_step(self.ranks[0])
        flow = torch.stack(everywhere).sum(0) / ranks
        sizes = sum(float(one.norm()) for one in everywhere) / ranks
        spread = sizes / max(float(flow.norm()), 1e-300)
        limit = math.sqrt(self.floor) / TIMES_THE_FLOOR
        self.floor = min(self.floor * max(spread, 1.0), limit)
        self.tolerance = TIMES_THE_FLOOR * self.floor
        if self.ranks[0].is_half:
            self.tolerance = self.ranks[0].eps
        if _parallel(gradient, flow, self.tolerance):
            factor = float(gradient @ flow / (flow @ flow))
            if gradient is not at_step and (cause := self._scaled_after_clip(at_step)):
                return cause
            return [factor / ranks] * len(everywhere)
        cause = self._lost(gradient)
        if cause is not None:
            return cause
        off = apart(gradient, flow)
        if self.ranks[0].is_half and off <= math.sqrt(self.ranks[0].eps) * TIMES_THE_FLOOR:
            variant = f"{percent(off)} of the sum is lost"
            return MistakeFit("16-bit-accumulation", variant, off, True)
        factors, left = fit_of([[one] for one in everywhere], [gradient])
        if left <= max(1e-4, self.tolerance) and len(everywhere) <= 64:
            return factors
        if ranks == 1 and apart(self.micros[0][-1].after, flow) <= self.tolerance:
            return (
                f"the loop itself changes the gradient by {percent(off)} after the last backward: "
                "use wb.verify"
            )
        variant = "the gradient of the step is not the sum of what the backwards added"
        return MistakeFit("", variant)

    def _lost(self, gradient: Tensor) -> MistakeFit | None:
        """Return the mistake that is seen in how gradients changed between the backwards."""
        for window, micros in zip(self.ranks, self.micros, strict=True):
            found = (
                _left_behind(micros, gradient)
                or _cleared(window, gradient)
                or self._clipped_early()
                or _twice(micros)
            )
            if found is not None:
                return found
        return None

    def _clipped_early(self, *, uncut: bool = False) -> MistakeFit | None:
        """Return the mistake of clipping before the last backward.

        A single clip that has changed nothing in this window counts with `uncut` only.
        """
        for window in self.ranks:
            count = len(window.backwards)
            clips = [clip for clip in window.clips if clip.limit < _NO_LIMIT]
            early = {clip.number for clip in clips if 0 < clip.number < count}
            if not early:
                continue
            last = any(clip.number == count for clip in clips)
            each = len(early) > 1 or (count == 2 and last)
            key = "clipped-per-micro-batch" if each else "clipped-too-early"
            variant = f"after micro-batch {', '.join(map(str, sorted(early)))} of {count}"
            if not any(clip.cuts for clip in clips if clip.number < count):
                if not each and not uncut:
                    continue
                variant += ", which clipped nothing in this window"
            return MistakeFit(key, variant)
        return None

    def _scaled_after_clip(self, at_step: Tensor) -> MistakeFit | None:
        """Return the mistake of a gradient that is divided after it was clipped."""
        clips = [clip for clip in self._last_clips(self.ranks[0]) if clip.cuts]
        if not clips or not bool(at_step.any()):
            return None
        factor = float(clips[-1].after.norm() / at_step.norm())
        if math.isclose(factor, 1.0, rel_tol=_WEIGHTS):
            return None
        scale = self.micros[0][0].loss_scale
        is_scale = scale != 1 and math.isclose(factor, scale, rel_tol=_WEIGHTS)
        is_scale |= factor > 2 * LOSS_SCALE - 1 and is_loss_scale(factor)
        key = "clipped-while-scaled" if is_scale else "clipped-too-early"
        return MistakeFit(key, f"clipped while {factor:.4g} times as large")

    @staticmethod
    def _at_step(window: RecordedWindow) -> Tensor:
        assert window.gradient is not None
        return window.gradient

    @staticmethod
    def _last_clips(window: RecordedWindow) -> list[RecordedClip]:
        """Return the clips after the last backward: before them, all gradients are in."""
        clips = [clip for clip in window.clips if clip.number == len(window.backwards)]
        return [clip for clip in clips if clip.limit < _NO_LIMIT or clip.cuts]

    def _before_clip(self, window: RecordedWindow) -> Tensor:
        """Return the gradient before it was clipped for the step, or that of the step."""
        clips = self._last_clips(window)
        at_step = self._at_step(window)
        if clips and _parallel(at_step, clips[-1].after, 1e-4):
            return clips[0].before
        return at_step

    # ------------------------------------------------------------- the weights

    def _weigh(self, columns: Sequence[Column], factors: Sequence[float]) -> MistakeFit | str:
        """Return what the weights of the losses tell; a reason where that is not certain."""
        known = list(self.owns) if len(self.owns) == len(columns) else [None] * len(columns)
        made = [
            self._made(column, factors, own) for column, own in zip(columns, known, strict=True)
        ]
        self.owns = []
        answers = [
            self._weigh_column(column, readings)
            for column, readings in zip(columns, made, strict=True)
        ]
        wrong = [a for a in answers if isinstance(a, MistakeFit) and a.key != RIGHT]
        reasons = [answer for answer in answers if isinstance(answer, str)]
        if wrong and len(wrong) < len(answers) and wrong[0].key in _CONSTANT:
            # A loop divides all terms in one way, so all must have a reading of this mistake.
            for column, readings in zip(columns, made, strict=True):
                named = [self._named(reading, column) for reading in readings]
                if wrong[0].key not in [one.key for one in named if one is not None]:
                    return "the terms of the loss are divided in different ways: use wb.verify"
        if wrong:
            return wrong[0]
        if reasons:
            return reasons[0]
        return max((a for a in answers if isinstance(a, MistakeFit)), key=lambda a: a.distance)

    @staticmethod
    def _made(column: Column, factors: Sequence[float], own: float | None) -> list[Reading]:
        """Return the ways to read a term, with what the loop did to its gradients."""
        made = [
            replace(r, weights=tuple(w * f for w, f in zip(r.weights, factors, strict=True)))
            for r in column.readings()
        ]
        return made if own is None else [one.with_own(own) for one in made]

    def _weigh_column(self, column: Column, made: Sequence[Reading]) -> MistakeFit | str:
        """Return what the weights of one term tell."""
        for reading in made:
            right = _right_fit(reading)
            if right.fits:
                self.units, self.owns = reading.units, [*self.owns, reading.own]
                if reading.own != 1.0:
                    note = f"the loss has a weight of {reading.own:g} of its own"
                    self.notes.append(note)
                return right
        twice = next((found for row in self.micros if (found := _twice(row))), None)
        if twice is not None:
            return twice
        for reading in made:
            found = self._named(reading, column)
            if found is None:
                continue
            self.units, self.off = reading.units, _right_fit(reading).distance
            if found.key == "not-divided" and found.variant == "sums added":
                return (
                    "the loss is a sum over its samples that nothing divides, which is right only "
                    "if the loss of the undivided batch is a sum, too: use wb.verify"
                )
            return found
        self.units = made[0].units
        total, constant = sum(made[0].units), made[0].constant
        if constant is None:
            is_mean = column.terms[0].kind == "mean" and column.terms[0].is_loss
            if is_mean and math.isclose(sum(made[0].weights), 1.0, rel_tol=_WEIGHTS):
                self.off = _right_fit(made[0]).distance
                variant = "weights that add up to 1, but are not the shares of the units"
                return MistakeFit("other-units", variant)
            return (
                "the weights of the micro-batches' losses are not their shares of the units, and "
                "fit no known mistake: use wb.verify"
            )
        return (
            f"the loss is divided by {total / constant:.6g} where {total:.6g} units came, and what "
            "it counts is not known: use wb.verify, or give the units to wb.Accumulator"
        )

    def _named(self, reading: Reading, column: Column) -> MistakeFit | None:
        """Return the mistake that gives these weights."""
        places, units = iter(reading.units), []
        for row in self.micros:
            units.append([next(places) for _ in row])
        others = [n for n in (self.usual, self.first) if n and n != self.count]
        nominals = others or [column.nominal or self.count]
        observed = torch.tensor(reading.weights, dtype=torch.float64)
        constant = reading.constant
        if constant is not None and is_loss_scale(constant):
            return MistakeFit("loss-scale", f"{constant:g} times too large")
        for nominal in dict.fromkeys(nominals):
            for fit in nearest(weightings(units, nominal), observed, _WEIGHTS):
                if fit.fits and fit.key != RIGHT:
                    return fit
        return None

    def _is_count(self, factor: float) -> bool:
        counts = (self.count, 1 / self.count)
        return any(math.isclose(factor, one, rel_tol=_WEIGHTS) for one in counts)

    # ------------------------------------------------------------- verdicts

    def told(self, fit: MistakeFit) -> LoopTrial:
        """Return the verdict of what was found."""
        if fit.key == RIGHT:
            return self._trial(RIGHT, [fit])
        off = 1.0 if fit.key == "no-update" else self.off
        return self._trial(
            fit.key or None, [fit, _right(off, False)] if fit.key else [_right(off, False)]
        )

    def not_judged(self, reason: str) -> LoopTrial:
        """Return the verdict that nothing can be known, with the reason."""
        self.notes = [reason, *self.notes]
        return self._trial(NOT_JUDGED, [_right(math.inf, False)])

    def _trial(self, found: str | None, fits: Sequence[MistakeFit]) -> LoopTrial:
        units, count, name = self.units, len(self.units) or len(self.every), self.name
        if count:
            kind = ""
            if units and count > 1:
                same = all(math.isclose(u, units[0], rel_tol=_WEIGHTS) for u in units)
                kind = "equal " if same else "uneven "
            name += f": {count} {kind}micro-batch{'' if count == 1 else 'es'}"
        return LoopTrial(
            case=self.case,
            name=name,
            micro_batches=count,
            units=tuple(units),
            optimizer_steps=1,
            found=found,
            fits=tuple(fits),
            tolerance=self.tolerance,
            floor=self.floor,
            observed_by=self.by,
            notes=tuple(dict.fromkeys(self.notes)),
        )


def beside(ranks: Sequence[RecordedWindow]) -> MistakeFit | None:
    """Return the mistake that is beside the gradient: weights, rates, layers that couple."""
    for window in ranks:
        later = window.backwards[1:]
        if any(micro.moved for micro in later):
            return MistakeFit("moved-in-the-window", "between two backwards")
        rates = [r for m in window.backwards if (r := m.rates.get(window.optimizer))]
        if len(set(rates)) > 1:
            seen = next(one for one in zip(*rates, strict=True) if len(set(one)) > 1)
            variant = f"from {seen[0]:.3g} to {seen[-1]:.3g}"
            return MistakeFit("scheduled-per-micro-batch", variant)
        if window.is_averaged_inside:
            return MistakeFit("averaged-per-micro-batch", "AveragedModel.update_parameters")
        if later and window.backwards[0].batchnorms:
            names = ", ".join(window.backwards[0].batchnorms[:3])
            return MistakeFit("coupled", f"BatchNorm: {names}")
    return None


def _left_behind(micros: Sequence[RecordedBackward], gradient: Tensor) -> MistakeFit | None:
    """Return the mistake of a window that begins with gradients of the one before."""
    first = micros[0].before
    if not bool(first.any()):
        return None
    flow = torch.stack([micro.contribution for micro in micros]).sum(0)
    _, left = fit_of([[flow], [first]], [gradient])
    if left > 1e-4:
        return None
    variant = "there are gradients before the first backward of the window"
    return MistakeFit("never-cleared", variant)


def _cleared(window: RecordedWindow, gradient: Tensor) -> MistakeFit | None:
    """Return the mistake of gradients that are cleared between two backwards."""
    micros, count = window.backwards, len(window.backwards)
    cleared = [
        i for i in range(1, count) if not micros[i].before.any() and micros[i - 1].after.any()
    ]
    if not cleared:
        return None
    rest = torch.stack([micro.contribution for micro in micros[cleared[-1] :]]).sum(0)
    if not _parallel(gradient, rest, 1e-4):
        return None
    key = "only-the-last" if len(cleared) == count - 1 else "cleared-in-the-window"
    return MistakeFit(key, f"cleared after micro-batch {', '.join(map(str, cleared))}")


def _begins_again(micros: Sequence[RecordedBackward]) -> bool:
    """True if weights are moved where gradients are cleared, in the middle of a window."""
    return any(m.moved and not m.before.any() and was.after.any() for was, m in pairwise(micros))


def _twice(micros: Sequence[RecordedBackward]) -> MistakeFit | None:
    """Return the mistake of a micro-batch whose gradient was brought twice."""
    for one, two in combinations(range(len(micros)), 2):
        if apart(micros[two].contribution, micros[one].contribution) <= 1e-6:
            return MistakeFit("counted-twice", f"number {one + 1} and {two + 1}")
    return None


def _right(off: float, fits: bool) -> MistakeFit:
    return MistakeFit(RIGHT, "the undivided batch", off, fits)


def _right_fit(reading: Reading) -> MistakeFit:
    """Return how far the weights are from their shares of the units."""
    total = sum(reading.units) or 1.0
    shares = [unit / total for unit in reading.units]
    pairs = zip(reading.weights, shares, strict=True)
    off = math.hypot(*(w - s for w, s in pairs)) / (math.hypot(*shares) or 1.0)
    return _right(off, off <= _WEIGHTS)


def _parallel(ours: Tensor, other: Tensor, tolerance: float) -> bool:
    """True if one gradient is the other times a positive number."""
    size = float(other @ other)
    factor = float(ours @ other) / size if size else 0.0
    return factor > 0 and apart(ours, other * factor) <= tolerance
