"""Judge one window: evidence, then weights, then explanations. Nothing is stored on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from wholebatch.verification.evidence import Backward, Counts, WindowEvidence
from wholebatch.verification.explanations import (
    BESIDE,
    LOST,
    SEEN,
    findings_of,
    is_lost,
    same_twice,
)
from wholebatch.verification.findings import Finding
from wholebatch.verification.loss_factors import Reading
from wholebatch.verification.loss_terms import COMPARES_OTHERS
from wholebatch.verification.verdicts import DIFFERENT, NOT_JUDGED, RIGHT, LoopTrial
from wholebatch.verification.weights import SAME_WEIGHT, Unknown, Weights, weights_of
from wholebatch.verification.wrong_weights import explain

_TWO_LOSSES = (
    "the backwards of the window are of different losses (a GAN's, or tasks in turn): add the "
    "losses and call backward once, or use wb.verify"
)
_TWO_PASSES = (
    "gradients are cleared and weights are moved in the middle of the window (SAM, or another "
    "optimizer of two passes): use wb.verify"
)
_NOTHING_ADDED = (
    "every update is made of one micro-batch, so nothing is accumulated; a loop that means to "
    "accumulate steps at every micro-batch"
)
_A_SUM = (
    "the loss is a sum over its samples that nothing divides, which is right only if the loss of "
    "the undivided batch is a sum, too: use wb.verify"
)
_PENALTY = "a penalty on the weights comes with the losses, and is not divided by their number"


def judge(
    ranks: Sequence[WindowEvidence],
    counts: Counts,
    name: str,
    *,
    own: Sequence[float] = (),
    case: str = "live",
    notes: Sequence[str] = (),
) -> LoopTrial:
    """Return the verdict on one window; `ranks` has its evidence on every rank.

    `own` are the weights that the terms of the loss have of their own, where another window tells.
    """
    every = [micro for window in ranks for micro in window.backwards]
    trial = LoopTrial(name, case=case, micro_batches=len(every), notes=tuple(notes))
    reason = _not_one_window(ranks)
    if reason:
        return trial.with_answer(NOT_JUDGED, reason)
    weights = weights_of(ranks, counts, own)
    if isinstance(weights, Weights):
        trial = trial.with_weights(weights)
    findings = _findings(ranks, weights, counts)
    is_sum = trial.source == "weights" and "sums added" in [f.variant for f in findings]
    if is_sum:
        findings = [finding for finding in findings if finding.is_beside]
    if findings:
        return trial.with_answer(DIFFERENT, findings=findings)
    if is_sum:
        return trial.with_answer(NOT_JUDGED, _A_SUM)
    if isinstance(weights, Unknown):
        answer = DIFFERENT if weights.is_different else NOT_JUDGED
        return trial.with_answer(answer, weights.reason)
    if not weights.is_right:
        return _unexplained(trial, weights)
    doubt = _doubt(ranks, counts)
    return trial.with_answer(NOT_JUDGED, doubt) if doubt else trial.with_answer(RIGHT)


def _not_one_window(ranks: Sequence[WindowEvidence]) -> str:
    """Return the reason why the backwards are not the micro-batches of one window."""
    if ranks[0].known is not None or ranks[0].ledger is not None:
        return ""
    micros = [micro for window in ranks for micro in window.backwards]
    if are_of_two_losses(micros):
        return _TWO_LOSSES
    if any(micro.doubt == COMPARES_OTHERS for micro in micros):
        return f"{COMPARES_OTHERS}: use wb.verify"
    return _TWO_PASSES if any(_begins_again(window.backwards) for window in ranks) else ""


def are_of_two_losses(micros: Sequence[Backward]) -> bool:
    """True if backwards differ in their operations, or in the one target of all their samples.

    A few labels of a classifier may be the same one by chance, but not those of every micro-batch.
    """
    targets = {micro.targets for micro in micros}
    return len({micro.operations for micro in micros}) > 1 or (
        len(targets) > 1 and frozenset() not in targets
    )


def _begins_again(micros: Sequence[Backward]) -> bool:
    """True if weights are moved where gradients are cleared, in the middle of a window."""
    return any(m.moved and not m.before.any() and was.after.any() for was, m in pairwise(micros))


def _findings(
    ranks: Sequence[WindowEvidence], weights: Weights | Unknown, counts: Counts
) -> list[Finding]:
    """Return all mistakes that explain the window, the one to begin with first."""
    is_right = isinstance(weights, Weights) and weights.is_right
    findings = findings_of(SEEN, ranks)
    if not findings and is_lost(ranks) and not (ranks[0].known is not None and is_right):
        findings = findings_of(LOST, ranks)[:1]
    if not findings and isinstance(weights, Weights) and not is_right:
        findings = findings_of([same_twice], ranks) or explain(weights, counts)
    beside = findings_of(BESIDE, ranks)
    findings += [replace(finding, is_beside=bool(findings)) for finding in beside]
    # A mistake that several tables find is told once, by the first.
    return list({finding.key: finding for finding in reversed(findings)}.values())[::-1]


def _doubt(ranks: Sequence[WindowEvidence], counts: Counts) -> str:
    """Return the reason why weights that are right may not make the right update."""
    if ranks[0].known is not None:
        return ""
    every = [micro for window in ranks for micro in window.backwards]
    if ranks[0].ledger is None and counts.usual == len(every) == 1:
        return _NOTHING_ADDED
    penalties = [term for micro in every for term in micro.terms if term.kind == "penalty"]
    numbers = [factor for term in penalties for factor in (*term.over, *term.times)]
    steps = (counts.micro_batches, 1 / max(counts.micro_batches, 1))
    is_divided = any(math.isclose(n, k, rel_tol=SAME_WEIGHT) for n in numbers for k in steps)
    doubt = _PENALTY if penalties and not is_divided else ""
    doubt = doubt or next((window.doubt for window in ranks if window.doubt), "")
    return doubt and f"{doubt}: use wb.verify"


def _unexplained(trial: LoopTrial, weights: Weights) -> LoopTrial:
    """Return the verdict on weights that are not right, and fit no known mistake."""
    if weights.source == "gradients":
        return trial.with_answer(DIFFERENT)
    reading: Reading = next(row[0] for row in weights.terms if row[0].off > SAME_WEIGHT)
    if reading.constant is None:
        if reading.is_mean_of_losses and math.isclose(
            sum(reading.weights), 1.0, rel_tol=SAME_WEIGHT
        ):
            variant = "weights that add up to 1, but are not the shares of the units"
            return trial.with_answer(DIFFERENT, findings=[Finding("other-units", variant)])
        return trial.with_answer(
            NOT_JUDGED,
            "the weights of the micro-batches' losses are not their shares of the units, and fit "
            "no known mistake: use wb.verify",
        )
    total = sum(reading.units)
    return trial.with_answer(
        NOT_JUDGED,
        f"the loss is divided by {total / reading.constant:.6g} where {total:.6g} units came, and "
        "what it counts is not known: use wb.verify, or give the units to wb.Accumulator",
    )
