"""The one judge of a loop's window: is it the undivided batch's update, and if not, why.

What the recorder saw is held against the right gradient, `sum of units × mean gradient / all
units`. On a loop function the mean gradients and units come from a model and a loss that are known.
Of a live loop the gradient of every micro-batch was seen, and the graph of its loss tells the
weight and the units that it came with; where the model's calls can be joined, the undivided batch
itself is run too. What cannot be known is not judged, and the reason is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from wholebatch.coupled import batchnorms
from wholebatch.coupled.loss_graph import LossTerm
from wholebatch.coupled.normalisation_layers import uses_batch_statistics
from wholebatch.distributed.process_group import largest_over_ranks, sum_over_ranks, world_size
from wholebatch.verification.joined_calls import JoinedCalls
from wholebatch.verification.loss_weights import TermWeights, Unreadable, read_weights
from wholebatch.verification.mistakes import (
    MISTAKES,
    NOT_JUDGED,
    RIGHT,
    Hypothesis,
    MistakeFit,
    WindowParts,
    apart,
    hypotheses,
    nearest,
    wrong_weights,
)
from wholebatch.verification.run_comparison import TIMES_THE_FLOOR, fit_of, percent
from wholebatch.verification.verdicts import LoopTrial
from wholebatch.verification.window_recorder import (
    RecordedClip,
    RecordedMicroBatch,
    RecordedWindow,
    WindowRecorder,
    with_turns,
)

EQUAL_UNITS = (
    "all micro-batches have equally many units, so a mean of means cannot be told from the mean "
    "here"
)
_IGNORED = -100
_NO_LIMIT = 1e6
"""Clipping to more than this is a way to measure a norm."""
_WEIGHTS = 1e-3
"""Weights of losses that differ by less are the same."""
_COUPLED = 1e-2
"""A model's own loss of the undivided batch that is farther from any weighting is coupled."""
_LOSS_SCALE = 64
"""A gradient that is a power of two too large, from here on, has a loss scale left in it."""


@dataclass
class LoopJudge:
    """Judges one window; `steps` is the number of micro-batches of a full one, where known."""

    window: RecordedWindow
    recorder: WindowRecorder
    name: str
    case: str = "live"
    steps: int | None = None
    like: Sequence[TermWeights] = ()
    """The terms of the loss in another window, whose weights and units were read."""
    was_right: bool = False
    """True if the first window was right, and this one is divided by the same number."""
    runs_undivided: bool = True
    together: bool = False
    """True if the losses of a backward are terms of one loss, and not of several micro-batches."""
    needs_calls: bool = False
    """True if the units are read from the inputs of the model."""
    notes: list[str] = field(default_factory=list)
    optimizer_steps: int = 1
    by: str = "gradients"
    as_seen: Callable[[Tensor], Tensor] = lambda gradient: gradient
    """Makes of a gradient what the loop is known to make of it: a clipped one, or an update."""

    def __post_init__(self) -> None:
        self.micros = self.window.micros
        self.floor, self.tolerance = self.window.unit, _WEIGHTS
        self.fits: list[MistakeFit] = []
        self.read: list[TermWeights] = []
        self.units: Sequence[float] = ()
        self.coupled_outputs = self.own_loss = False

    def trial_of(
        self, parts: WindowParts, floor: float, inputs: Sequence[Any], *, coupled: bool
    ) -> LoopTrial:
        """Return the verdict on a window whose parts are known, with what rounding explains.

        `coupled` tells that the undivided batch is not the sum of its micro-batches.
        """
        self.parts, self.floor, self.tolerance = parts, floor, TIMES_THE_FLOOR * floor
        self.units, self.coupled_outputs = parts.units, coupled
        return self._hold_against(inputs)

    def trial(self) -> LoopTrial:
        """Return the verdict on a window of a live loop.

        The losses of several calls in one backward are terms of one loss (a GAN's two), or several
        micro-batches: right is what is right in one way.
        """
        several = len(self.micros) > 1 and any(len(_by_call(m)) > 1 for m in self.micros)
        several = bool(largest_over_ranks(several))
        first = self._trial_of_calls(together=several)
        if first.found != RIGHT and several:
            apart = self._trial_of_calls(together=False)
            return apart if apart.found == RIGHT else first
        turns = with_turns(self.window)
        is_done = first.found == RIGHT or len(turns.micros) == len(self.micros)
        if not largest_over_ranks(is_done):
            joined = replace(self, window=turns).trial()
            return joined if joined.found == RIGHT else first
        return first

    def _trial_of_calls(self, *, together: bool) -> LoopTrial:
        self.notes, self.by, self.together = [], "gradients", together
        self.__post_init__()
        told = self._anywhere(self._told_by_calls())
        if told is not None:
            return self.told(told.key, told.variant)
        read = self._read()
        if largest_over_ranks(isinstance(read, Unreadable)):
            return self._without_weights(read)
        assert not isinstance(read, Unreadable)
        self.read, self.units = read, read[0].units
        if largest_over_ranks(len(self._owners)) < 2:
            return self._of_one_micro_batch()
        whole = self._micro_weights()
        if self.window.gradient is None or not self.window.sizes:
            return self._by_weights("weights of the losses")
        if largest_over_ranks(whole is None):
            return self._by_weights("weights of the losses, and their sum")
        assert whole is not None
        self._take_apart(*whole)
        inputs = [(call.args, call.kwargs) for m in self.micros for call in m.calls[:1]]
        known = not largest_over_ranks(len(inputs) != len(self.micros))
        return self._hold_against(inputs if known else ())

    def _told_by_calls(self) -> MistakeFit | None:
        """Return the mistake that is seen in which calls reached a backward, and how often."""
        roots = [root for micro in self.micros for root in micro.roots]
        if len(set(roots)) < len(roots):
            return MistakeFit("counted-twice", "two backwards of the same loss")
        passed_on = [micro.is_passed_on for micro in self.micros]
        if any(passed_on) and not all(passed_on):
            return MistakeFit("other-loss", f"{sum(passed_on)} of {len(passed_on)} backwards")
        window, count = self.window, len(self.micros)
        if window.is_empty:
            return MistakeFit("no-update", "no shard has a gradient: nothing was reduced")
        empty = [i + 1 for i, m in enumerate(self.micros) if {t.kind for t in m.terms} == {"zero"}]
        if empty:
            return MistakeFit("left-out", f"the loss of number {empty[0]} is multiplied by 0")
        used, unused = window.used or count, max(window.unused, window.earlier_pass - 1)
        if used == 1 and unused > 1:
            return MistakeFit("only-the-last", f"{unused} others reach no backward")
        if window.earlier_pass > count:
            return MistakeFit("left-out", f"{count} of {window.earlier_pass} in the last pass")
        if unused % used and not window.earlier_pass:
            return MistakeFit("left-out", f"{unused} that the model has seen: in no backward")
        return None

    @staticmethod
    def _anywhere(cause: MistakeFit | None) -> MistakeFit | None:
        """Return the mistake of this rank, or that of another: all go on in the same way."""
        keys = ["", *MISTAKES]
        key = keys[int(largest_over_ranks(keys.index(cause.key) if cause else 0))]
        if cause is not None and cause.key == key:
            return cause
        return MistakeFit(key, "on another rank") if key else None

    def _of_one_micro_batch(self) -> LoopTrial:
        left = float(self.micros[0].before.norm()) if self.micros[0].before.numel() else 0.0
        if left and (part := self._stepped_part()):
            return self.told("stepped-every-micro-batch", f"the optimizer of {part}")
        if left:
            return self.told("never-cleared", "there are gradients before the first backward")
        nominal = max(term.nominal for term in self.read)
        if nominal > 2:
            return self.told("stepped-every-micro-batch", f"the loss is divided by {nominal}")
        return self.not_judged(
            "every update is made of one micro-batch, so nothing is accumulated; a loop that "
            "means to accumulate steps at every micro-batch"
        )

    def _stepped_part(self) -> str:
        """Return a parameter whose optimizer has stepped and cleared while others add up."""
        rows = self.micros[0].before.split(self.window.sizes)
        part = [place for _, places in self.recorder.steps[-2:-1] for place in places]
        return self.window.names[part[0]] if part and not any(rows[i].any() for i in part) else ""

    # ----------------------------------------------------------------- weights

    def terms(self) -> list[TermWeights]:
        """Return the terms of the loss; [] if they cannot be read."""
        read = self._read()
        return [] if isinstance(read, Unreadable) else read

    def _read(self) -> list[TermWeights] | Unreadable:
        """Return the weights of every term; a backward may have several losses."""
        self._owners: list[int] = []
        losses: list[list[LossTerm]] = []
        for place, micro in enumerate(self.micros):
            rows = [micro.terms] if self.together else _by_call(micro)
            losses += rows
            self._owners += [place] * len(rows)
        scale, ranks = self.micros[0].loss_scale, world_size()
        labels = _labels(self.micros) if len(losses) == len(self.micros) else []
        known: dict[str, Any] = {"loss_scale": scale, "ranks": ranks, "samples": self._samples()}
        known["like"] = self.like
        counts = [micro.counts for micro in self.micros]
        if len({len(one) for one in counts}) == 1:
            known["counts"] = [sum(one) for one in zip(*counts, strict=True)]
        read = read_weights(losses, labels=labels, **known)
        if labels and not isinstance(read, Unreadable):
            plain = read_weights(losses, **known)
            self.needs_calls = plain != read
        if ranks == 1 or largest_over_ranks(isinstance(read, Unreadable)):
            return read
        assert not isinstance(read, Unreadable)
        if largest_over_ranks(len(read)) != -largest_over_ranks(-len(read)):
            return Unreadable("the losses of the ranks have different terms")
        return read_weights(losses, over_ranks=_over_ranks, labels=labels, **known)

    def _samples(self) -> int:
        """Return the rows of the tokens that the model was given; 0 where they are not known."""
        rows = [
            [len(t) for t in m.given if t.dim() > 1 and not t.is_floating_point()]
            for m in self.micros
        ]
        # The edges of a graph are no tokens: its outputs have other rows.
        made = [
            [len(one) for call in m.calls[:1] for one in call.rows.values()] for m in self.micros
        ]
        alike = all(row and row[0] in out for row, out in zip(rows, made, strict=True))
        return sum(row[0] for row in rows) if alike else 0

    def _micro_weights(self) -> tuple[list[float], list[float]] | None:
        """Return one weight and the units of each micro-batch; None if its terms differ in them."""
        rows = [self._sums(term) for term in self.read]
        weights, units = rows[0]
        if len(rows) > 1:
            constants = [self._constant(term) for term in self.read]
            if constants[0] is None or any(c is None for c in constants):
                shares = [[u / sum(of) for u in of] for _, of in rows]
                alike = all(_alike(row[0], weights) for row in rows)
                alike &= all(_alike(share, shares[0]) for share in shares)
                return rows[0] if alike else None
            if not _alike([c or 0.0 for c in constants], [constants[0]] * len(rows)):
                return None
            # All terms are right but for one factor: a micro-batch may be without labels for some.
            weights, units = next((row for row in rows if all(row[0])), rows[0])
        if len(self._owners) > len(self.micros) and self._constant(self.read[0]) is None:
            return None
        return weights, units

    def _constant(self, term: TermWeights) -> float | None:
        """Return c where the weights are c × their shares of the units × the loss scale."""
        total = sum(term.units)
        scales = [self.micros[owner].loss_scale for owner in self._owners]
        rows = zip(term.weights, term.units, scales, strict=True)
        found = [w * total / u / s for w, u, s in rows if u]
        return found[0] if found and _alike(found, [found[0]] * len(found)) else None

    def _sums(self, term: TermWeights) -> tuple[list[float], list[float]]:
        weights, units = [0.0] * len(self.micros), [0.0] * len(self.micros)
        for place, weight, unit in zip(self._owners, term.weights, term.units, strict=True):
            weights[place] += weight
            units[place] += unit
        return weights, units

    def _nominal(self) -> int:
        return self.steps or max(term.nominal for term in self.read)

    def _without_weights(self, read: list[TermWeights] | Unreadable) -> LoopTrial:
        reason = read if isinstance(read, Unreadable) else Unreadable("another rank's is not read")
        if largest_over_ranks(reason.coupled or self._linked()):
            return self.told("coupled", f"the loss of each micro-batch: {reason.reason}")
        if self.window.sizes and self.window.gradient is not None:
            found = self._lost_on_the_way(self._before_clip())
            if found is not None:
                return self._trial(found.key, [found, _right(math.inf)])
        return self.not_judged(f"the weight of the loss cannot be read: {reason.reason}")

    def _by_weights(self, by: str) -> LoopTrial:
        """Judge by the weights of the losses, in place of gradients."""
        scales = [self.micros[i].loss_scale for i in self._owners]
        for term in self.read:
            seen = [w / s for w, s in zip(term.weights, scales, strict=True)]
            observed = torch.tensor(seen, dtype=torch.float64)
            self.fits = nearest(self._weightings(term), observed, _WEIGHTS)
            if not _right_of(self.fits).fits:
                break
        best = next((fit.key for fit in self.fits if fit.fits), None)
        found = RIGHT if _right_of(self.fits).fits else best
        constants = [self._constant(term) for term in self.read]
        known = world_size() == 1 and None not in constants
        if found is None and constants[0] is not None and known:
            cause = self._of_constant(constants[0], sum(self.read[0].units))
            found, self.fits = cause.key, [cause, *self.fits]
        tolerance = _WEIGHTS
        if self.window.sizes and self.window.gradient is not None:
            gradient = self._before_clip()
            if found == RIGHT:
                off = largest_over_ranks(apart(gradient, self._averaged_flow()))
                tolerance = TIMES_THE_FLOOR * self.window.unit * math.sqrt(len(self.micros))
                self.fits = [_right(off, off <= tolerance)]
                found = RIGHT if off <= tolerance else None
            lost = None
            if found != RIGHT:
                lost = self._anywhere(self._lost_on_the_way(gradient) or self._compared())
            if lost is not None:
                found, self.fits = lost.key, [lost, *self.fits]
            found = self._beside(found)
        self.by = by
        return self._trial(found, self.fits, tolerance=tolerance)

    def _weightings(self, term: TermWeights) -> Iterator[Hypothesis]:
        """Yield the right weights of a term, and those of every mistake."""
        units = torch.tensor(term.units, dtype=torch.float64)
        parts = WindowParts(units, (), term.units, self._nominal())
        right = units * (world_size() / parts.units_everywhere)  # an engine averages the ranks
        yield Hypothesis(RIGHT, "the undivided batch", right)
        for key, variant, weights in wrong_weights(parts):
            yield Hypothesis(key, variant, torch.tensor(weights, dtype=torch.float64))

    # --------------------------------------------------------------- gradients

    def _take_apart(self, weights: list[float], units: list[float]) -> None:
        """Divide the gradients that were seen by the weights that they came with."""
        means = [
            micro.brought / weight if weight else micro.brought
            for micro, weight in zip(self.micros, weights, strict=True)
        ]
        parts = WindowParts(torch.zeros_like(means[0]), means, units, self._nominal())
        added = parts.weighted(units)
        everywhere = parts.units_everywhere
        right = sum_over_ranks(added) / everywhere
        sizes = sum(float(m.norm()) * u for m, u in zip(means, units, strict=True))
        spread = largest_over_ranks(sizes / max(float(added.norm()), 1e-300))
        limit = math.sqrt(self.window.unit) / TIMES_THE_FLOOR
        self.floor = min(self.window.unit * spread, limit)
        undivided = self._undivided(weights, units, everywhere)
        if undivided is not None:
            whole = sum_over_ranks(undivided)
            off = largest_over_ranks(apart(whole, right))
            if off <= limit:
                right, self.floor = whole, max(self.floor, off)
            elif self.own_loss and not self.window.half | bool(self.window.autocast):
                self.coupled_outputs |= fit_of([[mean] for mean in means], [whole])[1] > _COUPLED
        self.parts = replace(parts, right=right)
        self.tolerance = self.window.unit if self.window.half else TIMES_THE_FLOOR * self.floor

    def _hold_against(self, inputs: Sequence[Any]) -> LoopTrial:
        """Hold the gradient of the step against the right one, and name why it differs."""
        gradient, at_step = self._before_clip(), self._at_step()
        right = self.as_seen(self.parts.right)
        off = largest_over_ranks(apart(gradient, right))
        scale = self.read[0].scale if self.read else 1.0
        if off > self.tolerance and self._same(gradient * scale, right):
            right = right / scale  # a scale of the loop's own, which it has divided out again
            self.parts, scale = replace(self.parts, right=right), 1.0
            off = largest_over_ranks(apart(gradient, right))
        self.fits = [_right(off, off <= self.tolerance)]
        kept = gradient is at_step or self._same(at_step, self._last_clips()[-1].after)
        is_scaled = self._is_loss_scale(scale)
        if off <= self.tolerance and kept and not largest_over_ranks(not is_scaled):
            variant = f"the loss is multiplied by {scale:g}, and nothing divides by it again"
            self.fits = [MistakeFit("loss-scale", variant), _right(abs(scale - 1))]
            return self._trial("loss-scale", self.fits)
        if off <= self.tolerance and kept:
            return self._trial(self._beside(RIGHT), self.fits)
        cause = None
        if self.micros:
            cause = self._lost_on_the_way(gradient) or self._scaled(gradient) or self._compared()
        cause = self._anywhere(cause) or self._fitting(gradient, inputs)
        if cause is None:
            found = self._beside(None)
            if found is None and self.case == "live" and world_size() == 1:
                return self._changed_after_the_last(off)
            return self._trial(found, self.fits)
        self.fits = [cause, *(fit for fit in self.fits if fit.key != cause.key)]
        return self._trial(cause.key, self.fits)

    def _fitting(self, gradient: Tensor, inputs: Sequence[Any]) -> MistakeFit | None:
        """Return the mistake whose gradient this is."""
        tolerance = max(self.tolerance, TIMES_THE_FLOOR * self.floor)
        candidates, units = hypotheses(self.parts, inputs), self.parts.units_everywhere
        self.fits = nearest(candidates, gradient, tolerance, self.as_seen)
        if self.micros and self._same(gradient, self._averaged_flow()):
            self.fits = [fit for fit in self.fits if fit.key != "ranks-added"]
        fits = (fit for fit in self.fits if fit.fits and fit.key != RIGHT)
        cause = next(fits, None) or self._of_other_ranks()
        return cause or self._anywhere(
            self._other_constant(gradient, units)
            or self._owned_twice(gradient)
            or self._added_in_16_bits(gradient)
            or self._cut_by_hand()
            or self._added_by_hand()
        )

    def _of_other_ranks(self) -> MistakeFit | None:
        """Return the mistake of ranks that clip, or step, each with a gradient of its own."""
        at_step, clips = self._at_step(), self._last_clips()
        if not self._is_of_all_ranks(at_step):
            return MistakeFit("unsynchronised-ranks", "each rank steps with another gradient")
        if largest_over_ranks(not clips) or self._is_of_all_ranks(clips[-1].before):
            return None
        cut = sum_over_ranks(clips[-1].after) / world_size()
        if largest_over_ranks(not _parallel(at_step, cut, self.tolerance)):
            return None
        return MistakeFit("clipped-too-early", "each rank's own gradient, not their mean")

    def _is_of_all_ranks(self, gradient: Tensor) -> bool:
        """True if all ranks have this gradient."""
        ranks = world_size()
        return ranks == 1 or self._same(gradient, sum_over_ranks(gradient) / ranks)

    def _changed_after_the_last(self, off: float) -> LoopTrial:
        """Judge a gradient that the loop changes by itself when it is complete: noise, a clip.

        It would change that of the undivided batch in the same way.
        """
        right, last = self.parts.right, self.micros[-1].after
        added = apart(last / self.micros[-1].loss_scale, right)
        change = f"the loop itself changes the gradient by {percent(off)} after the last backward"
        if added <= self.tolerance:
            self.notes.append(f"{change}, as it would that of the undivided batch")
            self.fits = [_right(added, True)]
            return self._trial(self._beside(RIGHT), self.fits)
        is_scaled = _parallel(self._before_clip(), right, self.tolerance)
        if _parallel(last, right, self.tolerance) and not is_scaled:
            return self.not_judged(f"{change}: its scale cannot be known")
        return self._trial(None, self.fits)

    def _same(self, ours: Tensor, other: Tensor) -> bool:
        return largest_over_ranks(apart(ours, other)) <= self.tolerance

    def _averaged_flow(self) -> Tensor:
        """Return what the backwards brought, added, and averaged over the ranks."""
        flow = torch.stack([m.brought / m.loss_scale for m in self.micros]).sum(0)
        return sum_over_ranks(flow) / world_size()

    def _at_step(self) -> Tensor:
        assert self.window.gradient is not None
        return self.window.gradient

    def _last_clips(self) -> list[RecordedClip]:
        """Return the clips after the last backward: before them, all gradients are in."""
        clips = [clip for clip in self.window.clips if clip.micro_batches == len(self.micros)]
        return [clip for clip in clips if clip.limit < _NO_LIMIT or clip.cuts]

    def _before_clip(self) -> Tensor:
        clips = self._last_clips()
        kept = bool(clips) and _parallel(self._at_step(), clips[-1].after, 1e-4)
        if largest_over_ranks(not kept):
            return self._at_step()  # or the loop has put another gradient there since
        return clips[0].before

    def _lost_on_the_way(self, gradient: Tensor) -> MistakeFit | None:
        """Return the mistake that is seen in how gradients changed between the backwards."""
        micros, count = self.micros, len(self.micros)
        first = micros[0].before
        if float(first.norm()) > 0:
            ours = gradient - first * float(gradient @ first / (first @ first))
            sums = torch.stack([m.brought for m in micros]).sum(0)
            left = sums - first * float(sums @ first / (first @ first))
            if _parallel(ours, left, 1e-4) and self.window.leaked:
                variant = "the backwards of another optimizer's window, which nobody has cleared"
                return MistakeFit("other-loss", variant)
            if _parallel(ours, left, 1e-4):
                variant = "there are gradients already before the first backward of the window"
                return MistakeFit("never-cleared", variant)
        cleared = [
            place
            for place in range(1, count)
            if not float(micros[place].before.norm()) and float(micros[place - 1].after.norm())
        ]
        if cleared:
            rest = torch.stack([m.brought for m in micros[cleared[-1] :]]).sum(0)
            if _parallel(gradient, rest, 1e-4):
                key = "only-the-last" if len(cleared) == count - 1 else "cleared-in-the-window"
                places = ", ".join(str(place) for place in cleared)
                return MistakeFit(key, f"cleared after micro-batch {places}")
        for place, name in enumerate(self.window.names if not cleared else ()):
            pairs = [
                (m.before.split(self.window.sizes)[place], m.after.split(self.window.sizes)[place])
                for m in micros
            ]
            part = [i for i in range(1, count) if pairs[i - 1][1].any() and not pairs[i][0].any()]
            if part:
                variant = f"{name}, after micro-batch {', '.join(map(str, part))}"
                return MistakeFit("cleared-in-the-window", variant)
        owners = [call for micro in micros for call in micro.calls]
        if len(owners) > len(set(owners)):
            variant = "its loss is in the backwards of others too: a sum that is not begun anew"
            return MistakeFit("counted-twice", variant)
        for one, two in combinations(range(count), 2):
            is_again = apart(micros[two].brought, micros[one].brought) <= 1e-6
            if is_again and not self._clipped_early():
                return MistakeFit("counted-twice", f"number {one + 1} and {two + 1}")
        return self._clipped_early()

    def _clipped_early(self) -> MistakeFit | None:
        """Return the mistake of clipping before the last backward, if it cuts here or not."""
        count = len(self.micros)
        clips = [clip for clip in self.window.clips if clip.limit < _NO_LIMIT]
        early = {clip.micro_batches for clip in clips} - {count}
        if not early:
            return None
        last = any(clip.micro_batches == count for clip in clips)
        each = len(early) > 1 or (count == 2 and last)
        key = "clipped-per-micro-batch" if each else "clipped-too-early"
        variant = f"after micro-batch {', '.join(map(str, sorted(early)))} of {count}"
        if not any(clip.cuts for clip in clips if clip.micro_batches < count):
            variant += ", which has not cut anything in this window"
        return MistakeFit(key, variant)

    def _scaled(self, gradient: Tensor) -> MistakeFit | None:
        """Return the mistake of a right gradient that is scaled at the clip or at the step."""
        right, scales = self.parts.right, [m.loss_scale for m in self.micros]
        if len(set(scales)) == 1 and len(self.read) == 1 and len(self.read[0].weights) > 1:
            pairs = zip(self.read[0].weights, self.read[0].shares(), strict=True)
            by_hand = [w / share for w, share in pairs if share]
            scales = by_hand if all(map(self._is_loss_scale, by_hand)) else scales
        if len(set(scales)) > 1:
            return MistakeFit("loss-scale", f"from {scales[0]:g} to {scales[-1]:g} in the window")
        last = [(clip.after, self._at_step()) for clip in self._last_clips()[-1:]]
        rows = [zip(*(one.split(self.window.sizes) for one in pair), strict=True) for pair in last]
        factors = [float(a.norm() / b.norm()) for row in rows for a, b in row if b.any()]
        if scales[0] != 1 and any(math.isclose(f, scales[0], rel_tol=_WEIGHTS) for f in factors):
            variant = f"clipped while {scales[0]:.4g} times as large"
            return MistakeFit("clipped-while-scaled", variant)
        if gradient is not self._at_step():
            factor = float(self._last_clips()[-1].after.norm() / self._at_step().norm())
            if abs(factor - 1) > _WEIGHTS:
                scaled = factor > _LOSS_SCALE + 1 and self._is_loss_scale(factor)
                key = "clipped-while-scaled" if scaled else "clipped-too-early"
                return MistakeFit(key, f"clipped while {factor:.4g} times as large")
        if scales[0] != 1 and apart(gradient, right * scales[0]) <= self.tolerance:
            return MistakeFit("loss-scale", f"{scales[0]:g} times too large")
        return None

    def _other_constant(self, gradient: Tensor, units: float) -> MistakeFit | None:
        """Return the mistake of a gradient that is right but for a constant: another divisor."""
        right = self.as_seen(self.parts.right)
        factor = float(gradient @ right / (right @ right)) if float(right.norm()) else 0.0
        if factor <= 0 or apart(gradient, right * factor) > self.tolerance:
            return None
        if self._is_loss_scale(factor):
            return MistakeFit("loss-scale", f"{factor:g} times too large")
        weights = [w for term in self.read[:1] for w in self._sums(term)[0]]
        scales = [micro.loss_scale for micro in self.micros[: len(weights)]]
        of_losses = sum(w / s for w, s in zip(weights, scales, strict=True))
        known = [of_losses, *(units / unit for unit in self.parts.units if unit)]
        if not any(math.isclose(one, factor, rel_tol=_WEIGHTS) for one in known):
            return None  # the weights of the losses are others: it comes after them
        return self._of_constant(factor, units)

    @staticmethod
    def _is_loss_scale(factor: float) -> bool:
        power = math.log2(max(factor, 1e-300))
        return factor > _LOSS_SCALE - 1 and abs(power - round(power)) < _WEIGHTS

    def _of_constant(self, factor: float, units: float) -> MistakeFit:
        """Return the mistake of weights that are right but for this factor."""
        divisor = units / factor
        variant = f"divided by {divisor:.6g} units, and {units:.6g} came"
        padded = [sum(sizes) for sizes in zip(*(m.padded for m in self.micros), strict=False)]
        if any(math.isclose(divisor, one, rel_tol=_WEIGHTS) for one in padded):
            key = "other-units"
        elif self._is_times_ranks(factor):
            key, variant = "ranks-added", f"each loss is multiplied by {world_size()} ranks"
        elif self.was_right:
            key = "nominal-count"
        elif factor < 1:
            steps = [u * factor for u in self.units[:1]]  # if divided by its units instead
            is_own = any(math.isclose(one, len(self.units), rel_tol=_WEIGHTS) for one in steps)
            key = "other-units" if is_own else "left-out"
        else:
            each = self.read[0].units if self.read else ()
            more = [u for u in each if math.isclose(units - divisor, u, rel_tol=_WEIGHTS)]
            again = 1 < len(more) < len(each)  # one of them came twice, or the window is longer
            key = "counted-twice" if again else "nominal-count" if more else "not-divided"
        return MistakeFit(key, variant)

    def _is_times_ranks(self, factor: float) -> bool:
        """True if each loss is divided by the micro-batches, and multiplied by the ranks."""
        terms = [term for micro in self.micros for term in micro.terms]
        count, ranks = len(self.micros), world_size()
        known = count != ranks > 1 and math.isclose(factor, ranks, rel_tol=_WEIGHTS)
        return known and all(ranks in t.times and count in t.over for t in terms)

    def _owned_twice(self, gradient: Tensor) -> MistakeFit | None:
        """Return the mistake of gradients that are a whole number of times too large."""
        factors: dict[int, list[str]] = {}
        both = (one.split(self.window.sizes) for one in (gradient, self.parts.right))
        rows = zip(*both, self.window.names, strict=True)
        floor = self.tolerance * float(self.parts.right.norm())
        for ours, right, name in rows:
            if float(right.norm()) <= floor:
                continue
            factor = round(float(ours @ right / (right @ right)))
            if factor < 1 or float((ours - factor * right).norm()) > 10 * factor * floor:
                return None
            factors.setdefault(factor, []).append(name)
        if not factors or set(factors) == {1}:
            return None
        most = max(factors)
        if set(factors) == {world_size()}:
            return MistakeFit("ranks-added", f"{most} ranks, and nobody divides by them")
        where = factors[most][:3] if len(factors) > 1 else ["all parameters"]
        return MistakeFit("two-owners", f"{', '.join(where)}: {most} times")

    def _added_in_16_bits(self, gradient: Tensor) -> MistakeFit | None:
        if not self.window.half:
            return None
        off = apart(gradient, self.parts.right)
        if off > math.sqrt(self.window.unit) * TIMES_THE_FLOOR:
            return None
        variant = f"{percent(off)} of the sum is lost"
        return MistakeFit("16-bit-accumulation", variant, off, True)

    def _cut_by_hand(self) -> MistakeFit | None:
        """Return the mistake of a loop, or a hook, that clips after every backward by itself."""
        cuts = 0
        for micro, following in zip(self.micros, [*self.micros[1:], None], strict=True):
            left = micro.after if following is None else following.before
            whole = micro.before + micro.brought
            cuts += _is_cut(whole, left) or _is_cut(micro.brought, left - micro.before)
        variant = f"by hand, after {cuts} of {len(self.micros)} backwards"
        return MistakeFit("clipped-per-micro-batch", variant) if cuts > 1 else None

    def _added_by_hand(self) -> MistakeFit | None:
        """Return the mistake of a loop that adds the same to the gradient after every backward."""
        rows = zip(self.micros, [m.before for m in self.micros[1:]], strict=False)
        added = [left - micro.after for micro, left in rows]
        if len(added) < 2 or not all(_parallel(one, added[0], _WEIGHTS) for one in added):
            return None
        variant = f"weight decay, or the like, after each of {len(self.micros)} backwards"
        return MistakeFit("not-divided", variant)

    # --------------------------------------------------------------- beside the gradient

    def _beside(self, found: str | None) -> str | None:
        """Return the mistake that a right gradient does not show, or what was found before."""
        if found not in (RIGHT, None):
            return found
        later = self.micros[1:]
        rates = {m.rates for m in self.micros if m.rates}
        averaged = sum(m.average_moved for m in later)
        key, variant = None, ""
        if largest_over_ranks(any(m.moved for m in later)):
            key, variant = "moved-in-the-window", "between two backwards"
        elif largest_over_ranks(bool(self._statistic())):
            key, variant = self._statistic() or ("coupled", "another rank's loss")
        elif found is None:
            return None
        elif largest_over_ranks(len(rates) > 1):
            seen = list(zip(*(m.rates for m in self.micros if m.rates), strict=True))
            rate = next((one for one in seen if len(set(one)) > 1), seen[0])
            key, variant = "scheduled-per-micro-batch", f"from {rate[0]:.3g} to {rate[-1]:.3g}"
        elif largest_over_ranks(averaged >= max(1, len(later) - 1)):
            key, variant = "averaged-per-micro-batch", f"{averaged + 1} times in a window"
        elif largest_over_ranks(self.coupled_outputs and bool(self.window.moved_buffers)):
            moved = ", ".join(self.window.moved_buffers[:3])
            key, variant = "moved-in-the-window", f"a forward changes {moved}"
        elif largest_over_ranks(self._linked() or self.coupled_outputs or bool(self._norms())):
            key, variant = "coupled", self._coupling()
        elif largest_over_ranks(bool(self._weights_over())):
            key, variant = "coupled", f"weights of the samples {self._weights_over()} of each"
        elif largest_over_ranks(self._adds_penalty()):
            key, variant = "not-divided", f"a penalty on the weights, with each of {len(later) + 1}"
        elif largest_over_ranks(self._clipped_early() is not None):
            clipped = self._clipped_early() or MistakeFit("clipped-too-early", "")
            key, variant = clipped.key, clipped.variant
        if key is None:
            return found
        self.fits = [MistakeFit(key, variant), *self.fits]
        return key

    def _statistic(self) -> tuple[str, str] | None:
        """Return the mistake of a loss with a number of its own micro-batch, or of one before."""
        for micro in self.micros[1:]:
            one, calls = micro.statistic, micro.calls
            rows = [len(row) for call in calls for row in call.rows.values()]
            if one is None or one.born <= self.micros[0].number or one.rows > max(rows, default=0):
                continue  # taken before the window's first backward, or of more than this loss
            given = {tensor.data_ptr() for call in calls for tensor in call.given[:1]}
            if len(one.calls) == 1 < len(given):
                continue  # every call is a sample
            if one.seen < micro.number:
                return "moved-in-the-window", "a statistic of the micro-batches before is in a loss"
            return "coupled", "a statistic of each micro-batch, without a gradient, is in its loss"
        return None

    def _weights_over(self) -> str:
        """Return by which number of each micro-batch the weights of its samples are divided."""
        for rows in zip(*(micro.factors for micro in self.micros), strict=False):
            most = {(float(row.max()), int((row == 1).sum())) for row in rows}
            # Discounts by time begin with 1: here it is at another place each time.
            if len(rows) > 2 and most == {(1.0, 1)} and len({int(r.argmax()) for r in rows}) > 1:
                return "over the largest"
            if all(abs(float(row.double().mean()) - 1) < 1e-6 for row in rows):
                return "over the mean"
        return ""

    def _adds_penalty(self) -> bool:
        """True if a penalty on the weights comes with each loss and is not divided as it is."""
        count, rows = len(self.micros), [m.terms for m in self.micros]
        penalties = [[t for t in row if t.kind == "regulariser"] for row in rows]
        has_both = count > 1 and bool(self.read) and all(penalties)
        losses = [t for t in rows[0] if t.kind in ("mean", "sum")] if has_both else []
        total = sum(self.read[0].weights) / self.micros[0].loss_scale if losses else 0.0
        if not math.isclose(total, 1.0, rel_tol=_WEIGHTS) or losses[0].seed != 1:
            return False
        shared = {count, 1 / count, *(f for t in losses for f in (*t.over, *t.times))}
        own = [[f for t in row for f in (*t.times, *t.over) if f != 1] for row in penalties]
        is_divided = any(math.isclose(a, b) for a in own[0] for b in shared)
        return not is_divided and all(row == own[0] for row in own)

    def _compared(self) -> MistakeFit | None:
        """Return the mistake of a loss that compares samples, whatever it is divided by."""
        if not self._linked():
            return None
        rows = [
            r for m in self.micros for call in m.calls[:1] for r in list(call.rows.values())[:1]
        ]
        names = zip(self.window.names, self.window.sizes, strict=True)
        single = [name for name, size in names if size == 1]
        if single and all(unit == sum(map(len, rows)) for unit in self.units):
            variant = (
                f"{', '.join(single[:3])}: with each of {len(self.micros)} losses of the window"
            )
            return MistakeFit("two-owners", variant)  # open_clip's logit_scale
        return MistakeFit("coupled", self._coupling())

    def _linked(self) -> bool:
        return any(micro.linked for micro in self.micros)

    def _norms(self) -> list[str]:
        modules = dict.fromkeys(call.module for m in self.micros for call in m.calls)
        found = [pair for module in modules for pair in batchnorms(module)]
        return [name for name, m in found if m.training and uses_batch_statistics(m)]

    def _coupling(self) -> str:
        if self._linked():
            return "the loss compares samples"
        names = self._norms()
        return f"BatchNorm: {', '.join(names[:3])}" if names else "a layer mixes samples"

    def _undivided(
        self, weights: list[float], units: list[float], everywhere: float
    ) -> Tensor | None:
        """Run the undivided batch of this rank; return its share of the right gradient."""
        if not self.runs_undivided or self.window.stepped_inside:
            return None
        calls = JoinedCalls(self.window, self.recorder, self.read)
        made = calls.gradient(weights, [unit / everywhere for unit in units])
        self.notes += calls.notes
        self.coupled_outputs, self.own_loss = calls.coupled, calls.own_loss
        return None if largest_over_ranks(made is None) else made

    # --------------------------------------------------------------- the trial

    def told(self, key: str, variant: str) -> LoopTrial:
        """Return the verdict of a mistake that was seen, and needs no gradient to be compared."""
        fit = MistakeFit(key, variant)
        return self._trial(key, [fit, _right(1.0 if key == "no-update" else math.inf)])

    def not_judged(self, reason: str) -> LoopTrial:
        """Return the verdict that nothing can be known, with the reason."""
        self.notes.append(reason)
        return self._trial(NOT_JUDGED, [_right(math.inf)])

    def _trial(
        self, found: str | None, fits: Sequence[MistakeFit], *, tolerance: float | None = None
    ) -> LoopTrial:
        units, count, name = self.units, len(self.units) or len(self.micros), self.name
        if self.case == "live":
            kind = "equal " if units and _alike(units, [units[0]] * count) else "uneven "
            kind = kind if units and count > 1 else ""
            name += f": {count} {kind}micro-batch{'es' * (count > 1)}" if count else ""
            if found == RIGHT and kind == "equal ":
                self.notes.append(EQUAL_UNITS)
        for scale in {term.scale for term in self.read} - {1.0}:
            self.notes.append(f"the loss has a weight of {scale:g} of its own")
        fits = self.fits if self.fits and found == self.fits[0].key else fits
        return LoopTrial(
            case=self.case,
            name=name,
            micro_batches=count,
            units=tuple(units),
            optimizer_steps=self.optimizer_steps,
            found=found,
            fits=tuple(fits),
            tolerance=self.tolerance if tolerance is None else tolerance,
            floor=self.floor,
            observed_by=self.by,
            notes=tuple(self.notes),
        )


def _by_call(micro: RecordedMicroBatch) -> list[list[LossTerm]]:
    """Return the losses of a backward: one of each call, where it adds those of several."""
    modules = {call.module for call in micro.calls}
    terms = [term for term in micro.terms if term.kind != "joined"]
    kinds = {(term.node, term.kind) for term in terms}
    each = len(micro.calls) > 1 and len(modules) == 1 and len(kinds) == 1
    if each and len(micro.calls) == len(terms):
        return [[term] for term in terms]
    return [micro.terms]


def _labels(micros: Sequence[RecordedMicroBatch]) -> list[tuple[list[float], list[float]]]:
    """Return what the calls' labels count: of all, those that are not ignored (-100).

    A causal model may leave out the first label of every sample.
    """
    found: dict[int, list[Tensor]] = {}
    for micro in micros:
        for place, tensor in enumerate(micro.given):
            found.setdefault(place, []).append(tensor)
    counts = []
    for tensors in found.values():
        if len(tensors) != len(micros) or any(
            t.is_floating_point() or t.dim() < 2 for t in tensors
        ):
            continue
        if not any(bool((t == _IGNORED).any()) for t in tensors):
            continue
        for cut in ([t[:, 1:] for t in tensors], tensors):
            valid = [float((t != _IGNORED).sum()) for t in cut]
            for full in (cut, tensors):
                counts.append(([float(t.numel()) for t in full], valid))
    return counts


def _over_ranks(numbers: list[float]) -> list[float]:
    """Return each number added over the ranks; none if they do not have equally many."""
    most = largest_over_ranks(len(numbers))
    if largest_over_ranks(-len(numbers)) != -most:
        return list(numbers)
    added: list[float] = sum_over_ranks(torch.tensor(numbers, dtype=torch.float64)).tolist()
    return added


def _right(distance: float, fits: bool = False) -> MistakeFit:
    return MistakeFit(RIGHT, "the undivided batch", distance, fits)


def _right_of(fits: Sequence[MistakeFit]) -> MistakeFit:
    return next(fit for fit in fits if fit.key == RIGHT)


def _alike(ours: Sequence[float], others: Sequence[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=_WEIGHTS) for a, b in zip(ours, others, strict=True))


def _is_cut(whole: Tensor, left: Tensor) -> bool:
    """Tell if one gradient is the other, clipped: by value, by norm, or by parameter."""
    size, kept = whole.abs(), left * whole.sign()
    shrinks = bool((kept >= 0).all() and (kept <= size * (1 + _WEIGHTS)).all())
    return shrinks and bool(((kept > 0) & (kept < size * (1 - _WEIGHTS))).any())


def _parallel(ours: Tensor, other: Tensor, tolerance: float) -> bool:
    """Tell if one gradient is the other times a positive number, on this rank."""
    size = float(other @ other)
    factor = float(ours @ other) / size if size else 0.0
    return factor > 0 and apart(ours, other * factor) <= tolerance
