"""Explanations that read the evidence of a window itself, and not the weights.

`SEEN` is wrong whatever the weights, `LOST` is what became of a gradient that is not in the step,
and `BESIDE` goes wrong beside a right gradient. The weights are explained in wrong_weights.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import torch
from torch import Tensor

from wholebatch.readable_sizes import percent
from wholebatch.verification.distances import TIMES_THE_FLOOR, apart, fit_of, parallel
from wholebatch.verification.evidence import Backward, Counts, WindowEvidence
from wholebatch.verification.findings import Finding, micro_batches
from wholebatch.verification.loss_factors import LOSS_SCALE, is_loss_scale
from wholebatch.verification.weights import SAME_WEIGHT, before_clip

Ranks = Sequence[WindowEvidence]
"""The evidence of one window on every rank."""
Findings = Iterator[Finding]


def findings_of(table: Sequence[Callable[[Ranks], Findings]], ranks: Ranks) -> list[Finding]:
    """Return the first finding of every explanation that has one."""
    firsts = (next(explain(ranks), None) for explain in table)
    return [finding for finding in firsts if finding is not None]


def _flow(micros: Sequence[Backward]) -> Tensor:
    return torch.stack([micro.contribution for micro in micros]).sum(0)


# ------------------------------------------------------------------- whatever the weights


def _times_zero(ranks: Ranks) -> Findings:
    for window in ranks:
        for place, micro in enumerate(window.backwards, start=1):
            if {term.kind for term in micro.terms} == {"zero"}:
                yield Finding("left-out", f"the loss of number {place} is multiplied by 0")


def _scale_changes(ranks: Ranks) -> Findings:
    for window in ranks:
        scales = [micro.loss_scale for micro in window.backwards]
        if len(set(scales)) > 1:
            yield Finding("loss-scale", f"from {scales[0]:g} to {scales[-1]:g} in the window")


def _unsynchronised(ranks: Ranks) -> Findings:
    """Find ranks that clip, or step, each with a gradient of its own."""
    gradients = [window.gradient for window in ranks if window.gradient is not None]
    before = [window.last_clips[-1].before for window in ranks if window.last_clips]
    limit = TIMES_THE_FLOOR**2 * max(window.eps for window in ranks)

    def differ(rows: Sequence[Tensor]) -> bool:
        return len(rows) == len(ranks) and any(apart(row, rows[0]) > limit for row in rows[1:])

    if differ(gradients):
        yield Finding("unsynchronised-ranks", "each rank steps with another gradient")
    elif len(gradients) == len(ranks) and differ(before):
        yield Finding("clipped-too-early", "each rank's own gradient, not their mean")


def _scaled_after_clip(ranks: Ranks) -> Findings:
    """Find a gradient that is divided after it was clipped."""
    window = ranks[0]
    clips, gradient = [clip for clip in window.last_clips if clip.cuts], window.gradient
    if not clips or gradient is None or not parallel(gradient, clips[-1].after, 1e-4):
        return
    factor = float(clips[-1].after.norm() / gradient.norm())
    if math.isclose(factor, 1.0, rel_tol=SAME_WEIGHT):
        return
    scale = window.backwards[0].loss_scale if window.backwards else 1.0
    is_scale = scale != 1 and math.isclose(factor, scale, rel_tol=SAME_WEIGHT)
    is_scale |= factor > 2 * LOSS_SCALE - 1 and is_loss_scale(factor)
    key = "clipped-while-scaled" if is_scale else "clipped-too-early"
    yield Finding(key, f"clipped while {factor:.4g} times as large")


SEEN = (_times_zero, _scale_changes, _unsynchronised, _scaled_after_clip)
"""Mistakes that are seen in the evidence, whatever the weights."""


# ------------------------------------------------------------------- a gradient that is lost


def of_two_passes(ranks: Ranks, counts: Counts) -> Findings:
    """Find a window over two passes of the data: the first pass ended without a step.

    This is asked first of a gradient that is not right: its cause is the tail that was left.
    """
    for window in ranks:
        micros = window.backwards
        ends = [
            i for i in range(1, len(micros)) if micros[i].loader_pass != micros[i - 1].loader_pass
        ]
        if not ends:
            continue
        left = f"the last {micro_batches(ends[0])} of a pass over the data"
        if window.cleared == ends[:1]:
            yield Finding("no-update", f"{left} are cleared without a step")
        elif len(micros) > counts.usual and not window.cleared:
            after = f"they are in the first step of the next one, with {len(micros) - ends[0]} more"
            yield Finding("no-update", f"{left} have no step: {after}")


def _never_cleared(ranks: Ranks) -> Findings:
    """Find a window that begins with gradients of the one before."""
    for window in ranks:
        first = window.backwards[0].before
        parts = [_flow(window.backwards), first]
        if first.any() and fit_of(parts, before_clip(ranks[0]))[1] <= 1e-4:
            variant = "there are gradients before the first backward of the window"
            yield Finding("never-cleared", variant)


def _cleared(ranks: Ranks) -> Findings:
    """Find gradients that are cleared between two backwards, or before the step."""
    for window in ranks:
        micros, cleared = window.backwards, window.cleared
        if micros[-1].after.any() and not before_clip(window).any():
            yield Finding("cleared-in-the-window", "cleared before the step")
        if cleared and parallel(before_clip(ranks[0]), _flow(micros[cleared[-1] :]), 1e-4):
            key = "only-the-last" if len(cleared) == len(micros) - 1 else "cleared-in-the-window"
            yield Finding(key, f"cleared after micro-batch {', '.join(map(str, cleared))}")


def _clipped_early(ranks: Ranks) -> Findings:
    """Find clips before the last backward; one that changed nothing counts in `verify_loop`."""
    for window in ranks:
        count = len(window.backwards)
        clips = [clip for clip in window.clips if clip.counts]
        early = {clip.number for clip in clips if 0 < clip.number < count}
        last = any(clip.number == count for clip in clips)
        is_each = len(early) > 1 or (count == 2 and last)
        does_cut = any(clip.cuts for clip in clips if clip.number < count)
        if early and (is_each or does_cut or window.units):
            key = "clipped-per-micro-batch" if is_each else "clipped-too-early"
            variant = f"after micro-batch {', '.join(map(str, sorted(early)))} of {count}"
            yield Finding(key, variant + ("" if does_cut else ", which clipped nothing here"))


def same_twice(ranks: Ranks) -> Findings:
    """Find a micro-batch whose gradient was brought twice."""
    for window in ranks:
        for (i, first), (j, second) in combinations(enumerate(window.backwards, start=1), 2):
            if apart(first.contribution, second.contribution) <= 1e-6:
                yield Finding("counted-twice", f"number {i} and {j}")


def _in_16_bits(ranks: Ranks) -> Findings:
    flow = _flow([micro for window in ranks for micro in window.backwards])
    off = apart(before_clip(ranks[0]), flow / len(ranks))
    if ranks[0].is_half and off <= math.sqrt(ranks[0].eps) * TIMES_THE_FLOOR:
        yield Finding("16-bit-accumulation", f"{percent(off)} of the sum is lost")


LOST = (_never_cleared, _cleared, _clipped_early, same_twice, _in_16_bits)
"""What becomes of gradients that are not in the step as they were brought."""


# ------------------------------------------------------------------- beside a right gradient


def _moved(ranks: Ranks) -> Findings:
    if any(micro.moved for window in ranks for micro in window.backwards[1:]):
        yield Finding("moved-in-the-window", "between two backwards")


def _scheduled(ranks: Ranks) -> Findings:
    for window in ranks:
        rates = [micro.rates for micro in window.backwards if micro.rates]
        if len(set(rates)) > 1:
            changed = next(column for column in zip(*rates, strict=True) if len(set(column)) > 1)
            variant = f"from {changed[0]:.3g} to {changed[-1]:.3g}"
            yield Finding("scheduled-per-micro-batch", variant)


def _averaged(ranks: Ranks) -> Findings:
    # An average that moves once per window is right, wherever that is.
    if any(sum(micro.is_averaged for micro in window.backwards) > 1 for window in ranks):
        yield Finding("averaged-per-micro-batch", "an average of the weights moves in the window")


def _coupled(ranks: Ranks) -> Findings:
    for window in ranks:
        micros = window.backwards
        if len(micros) > 1 and micros[0].batchnorms:
            yield Finding("coupled", f"BatchNorm: {', '.join(micros[0].batchnorms[:3])}")
        curved = [t.node for m in micros for t in m.terms if t.kind == "curved"]
        if len(micros) > 1 and curved:
            variant = f"the loss: it is a function of a mean over its samples ({curved[0]})"
            yield Finding("coupled", variant)


BESIDE = (_moved, _scheduled, _averaged, _coupled, _clipped_early)
"""Mistakes beside the weights, which are reported together with them."""
