"""Explanations that read the evidence of a window itself, and not the weights.

`SEEN` is wrong whatever the weights, `LOST` is what became of a gradient that is not in the step,
and `BESIDE` goes wrong beside a right gradient. The weights are explained in wrong_weights.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import torch

from wholebatch.readable_sizes import percent
from wholebatch.verification.distances import TIMES_THE_FLOOR, apart, fit_of, parallel
from wholebatch.verification.evidence import WindowEvidence
from wholebatch.verification.findings import Finding
from wholebatch.verification.loss_factors import LOSS_SCALE, is_loss_scale
from wholebatch.verification.weights import SAME_WEIGHT, before_clip, floor_of

Ranks = Sequence[WindowEvidence]
"""The evidence of one window on every rank."""


# ------------------------------------------------------------------- whatever the weights


def _repeated(ranks: Ranks) -> Finding | None:
    if any(micro.is_repeated for window in ranks for micro in window.backwards):
        return Finding("counted-twice", "two backwards of the same loss")
    return None


def _times_zero(ranks: Ranks) -> Finding | None:
    for window in ranks:
        for place, micro in enumerate(window.backwards, start=1):
            if {term.kind for term in micro.terms} == {"zero"}:
                return Finding("left-out", f"the loss of number {place} is multiplied by 0")
    return None


def _scale_changes(ranks: Ranks) -> Finding | None:
    for window in ranks:
        scales = [micro.loss_scale for micro in window.backwards]
        if len(set(scales)) > 1:
            variant = f"from {scales[0]:g} to {scales[-1]:g} in the window"
            return Finding("loss-scale", variant)
    return None


def _unsynchronised(ranks: Ranks) -> Finding | None:
    """Find ranks that clip, or step, each with a gradient of its own."""
    gradients = [window.gradient for window in ranks if window.gradient is not None]
    if len(gradients) < 2 or len(gradients) < len(ranks):
        return None
    limit = TIMES_THE_FLOOR**2 * max(window.eps for window in ranks)
    if any(apart(gradient, gradients[0]) > limit for gradient in gradients[1:]):
        return Finding("unsynchronised-ranks", "each rank steps with another gradient")
    before = [window.last_clips[-1].before for window in ranks if window.last_clips]
    if len(before) == len(ranks) and any(apart(b, before[0]) > limit for b in before[1:]):
        return Finding("clipped-too-early", "each rank's own gradient, not their mean")
    return None


def _scaled_after_clip(ranks: Ranks) -> Finding | None:
    """Find a gradient that is divided after it was clipped."""
    window = ranks[0]
    clips, gradient = [clip for clip in window.last_clips if clip.cuts], window.gradient
    if not clips or gradient is None or not parallel(gradient, clips[-1].after, 1e-4):
        return None
    factor = float(clips[-1].after.norm() / gradient.norm())
    if math.isclose(factor, 1.0, rel_tol=SAME_WEIGHT):
        return None
    scale = window.backwards[0].loss_scale if window.backwards else 1.0
    is_scale = scale != 1 and math.isclose(factor, scale, rel_tol=SAME_WEIGHT)
    is_scale |= factor > 2 * LOSS_SCALE - 1 and is_loss_scale(factor)
    key = "clipped-while-scaled" if is_scale else "clipped-too-early"
    return Finding(key, f"clipped while {factor:.4g} times as large")


SEEN = (_repeated, _times_zero, _scale_changes, _unsynchronised, _scaled_after_clip)
"""Mistakes that are seen in the evidence, whatever the weights."""


# ------------------------------------------------------------------- a gradient that is lost


def _never_cleared(ranks: Ranks) -> Finding | None:
    """Find a window that begins with gradients of the one before."""
    for window in ranks:
        first = window.backwards[0].before
        if first.any():
            flow = torch.stack([micro.contribution for micro in window.backwards]).sum(0)
            if fit_of([flow, first], before_clip(ranks[0]))[1] <= 1e-4:
                variant = "there are gradients before the first backward of the window"
                return Finding("never-cleared", variant)
    return None


def _cleared(ranks: Ranks) -> Finding | None:
    """Find gradients that are cleared between two backwards, or before the step."""
    for window in ranks:
        micros, count = window.backwards, len(window.backwards)
        if micros[-1].after.any() and not before_clip(window).any():
            return Finding("cleared-in-the-window", "cleared before the step")
        cleared = [
            i for i in range(1, count) if not micros[i].before.any() and micros[i - 1].after.any()
        ]
        if cleared:
            rest = torch.stack([micro.contribution for micro in micros[cleared[-1] :]]).sum(0)
            if parallel(before_clip(ranks[0]), rest, 1e-4):
                key = "only-the-last" if len(cleared) == count - 1 else "cleared-in-the-window"
                return Finding(key, f"cleared after micro-batch {', '.join(map(str, cleared))}")
    return None


def _clipped_early(ranks: Ranks) -> Finding | None:
    """Find clips before the last backward.

    A single one that has changed nothing counts in a proof, which is about other data, too.
    """
    for window in ranks:
        count = len(window.backwards)
        clips = [clip for clip in window.clips if clip.counts]
        early = {clip.number for clip in clips if 0 < clip.number < count}
        last = any(clip.number == count for clip in clips)
        is_each = len(early) > 1 or (count == 2 and last)
        does_cut = any(clip.cuts for clip in clips if clip.number < count)
        if early and (is_each or does_cut or window.known is not None):
            key = "clipped-per-micro-batch" if is_each else "clipped-too-early"
            variant = f"after micro-batch {', '.join(map(str, sorted(early)))} of {count}"
            return Finding(key, variant + ("" if does_cut else ", which clipped nothing here"))
    return None


def same_twice(ranks: Ranks) -> Finding | None:
    """Find a micro-batch whose gradient was brought twice."""
    for window in ranks:
        for first, second in combinations(range(len(window.backwards)), 2):
            brought = [window.backwards[place].contribution for place in (first, second)]
            if apart(*brought) <= 1e-6:
                return Finding("counted-twice", f"number {first + 1} and {second + 1}")
    return None


def _in_16_bits(ranks: Ranks) -> Finding | None:
    brought = [micro.contribution for window in ranks for micro in window.backwards]
    off = apart(before_clip(ranks[0]), torch.stack(brought).sum(0) / len(ranks))
    if ranks[0].is_half and off <= math.sqrt(ranks[0].eps) * TIMES_THE_FLOOR:
        return Finding("16-bit-accumulation", f"{percent(off)} of the sum is lost")
    return None


LOST = (_never_cleared, _cleared, _clipped_early, same_twice, _in_16_bits)
"""What becomes of gradients that are not in the step as they were brought."""


def is_lost(ranks: Ranks) -> bool:
    """True if the gradient of the step is not what all backwards brought, with one factor."""
    brought = [micro.contribution for window in ranks for micro in window.backwards]
    if not brought or any(window.gradient is None or not window.backwards for window in ranks):
        return False
    flow = torch.stack(brought).sum(0)
    tolerance = TIMES_THE_FLOOR * floor_of(brought, flow, max(window.eps for window in ranks))
    return not parallel(
        before_clip(ranks[0]), flow, ranks[0].eps if ranks[0].is_half else tolerance
    )


# ------------------------------------------------------------------- beside a right gradient


def _moved(ranks: Ranks) -> Finding | None:
    if any(micro.moved for window in ranks for micro in window.backwards[1:]):
        return Finding("moved-in-the-window", "between two backwards")
    return None


def _scheduled(ranks: Ranks) -> Finding | None:
    for window in ranks:
        rates = [micro.rates for micro in window.backwards if micro.rates]
        if len(set(rates)) > 1:
            changed = next(column for column in zip(*rates, strict=True) if len(set(column)) > 1)
            variant = f"from {changed[0]:.3g} to {changed[-1]:.3g}"
            return Finding("scheduled-per-micro-batch", variant)
        if window.ledger is not None and window.ledger.schedule_moved:
            return Finding("scheduled-per-micro-batch", "the rate changed within the window")
    return None


def _averaged(ranks: Ranks) -> Finding | None:
    if any(window.is_averaged_inside for window in ranks):
        return Finding("averaged-per-micro-batch", "an average of the weights moves in the window")
    return None


def _coupled(ranks: Ranks) -> Finding | None:
    for window in ranks:
        micros = window.backwards
        if len(micros) > 1 and micros[0].batchnorms:
            return Finding("coupled", f"BatchNorm: {', '.join(micros[0].batchnorms[:3])}")
        curved = [t.node for m in micros for t in m.terms if t.kind == "curved"]
        if len(micros) > 1 and curved and window.known is None:
            variant = f"the loss: it is a function of a mean over its samples ({curved[0]})"
            return Finding("coupled", variant)
        if window.known is not None and window.known.is_coupled:
            return Finding("coupled", "a layer mixes samples")
    return None


def _mean_as_sum(ranks: Ranks) -> Finding | None:
    """Find totals of wholebatch's windows that are means: they are divided by their units twice."""
    for window in ranks:
        ledger = window.ledger
        if ledger is None or not ledger.terms or len(ledger.terms) != len(ledger.units):
            continue
        alone = [terms[0] for terms in ledger.terms if len(terms) == 1 and terms[0].kind == "mean"]
        if len(alone) < len(ledger.terms):
            continue
        factors = [math.prod(term.times) / math.prod(term.over) for term in alone]
        are_same = all(math.isclose(factor, factors[0], rel_tol=SAME_WEIGHT) for factor in factors)
        is_over_many = all(term.count > 1 for term in alone) and min(ledger.units) > 1
        if are_same and is_over_many and factors[0] < 2:
            return Finding("mean-as-sum", f"means over {alone[0].count:g} and more")
    return None


BESIDE = (_moved, _scheduled, _averaged, _coupled, _clipped_early, _mean_as_sum)
"""Mistakes beside the weights, which are reported together with them."""
