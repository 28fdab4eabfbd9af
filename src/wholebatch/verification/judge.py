"""Judge one window: evidence, then weights, then explanations. Nothing is stored on the way.

Recorders write facts. Here they are ranked: what was done to the gradients, the weights, what goes
wrong beside them, and last the reasons to doubt that right weights make the right update.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, MutableMapping, Sequence
from dataclasses import replace

from wholebatch.verification.divided_batch import NOT_SHIFTED, other_counts
from wholebatch.verification.evidence import Backward, Counts, WindowEvidence
from wholebatch.verification.explanations import (
    BESIDE,
    LOST,
    SEEN,
    findings_of,
    of_two_passes,
    same_twice,
)
from wholebatch.verification.findings import Finding
from wholebatch.verification.loss_terms import COMPARES
from wholebatch.verification.verdicts import DIFFERENT, NOT_JUDGED, RIGHT, LoopTrial
from wholebatch.verification.weights import SAME_WEIGHT, Part, Unknown, Weights, is_lost, weights_of
from wholebatch.verification.wrong_weights import explain

_NO_ANSWER = {
    "two losses": "the backwards of the window are of different losses, and not equally many of "
    "each: add the losses and call backward once",
    "reaches others": "a loss reaches the parameters of several optimizers, and its gradient is "
    "added to that of another loss: freeze the others for it",
    "two passes": "gradients are cleared and weights are moved in the middle of the window (SAM)",
    "a sum": "the loss is a sum over its samples that nothing divides, which is right only if the "
    "loss of the undivided batch is a sum, too",
    "counted": "a window of another size came after those that were recorded, and was only counted",
}
"""Reasons why a window is not judged."""
_DOUBTS = {
    "alone": "every update is made of one micro-batch, so nothing is accumulated",
    "carried": "an output of one micro-batch is an input of a later one in the same window",
    "changed": "a number that the called modules hold changes between two backwards of the window",
    "shares graph": "two backwards of the window have a part of their graph in common",
    "hooks": "the loop has hooks on parameters, which may change gradients",
    "evaluated": "the model is also called without gradients before every backward, so the loss "
    "may use a statistic of one micro-batch",
    "changed beside": "the loop changes the weights beside the step",
    COMPARES: "the loss may compare samples with each other",
    "sorts samples": "the loss sorts its samples, or picks the largest of them",
    "normalised weights": "the weights of the samples may be normalised in a micro-batch",
    "statistic": "the loss has a statistic of the micro-batch",
    "statistic in every sample": "the loss has a statistic of the micro-batch in every sample",
    "penalty": "a penalty on the weights comes with the losses: it must be divided with them",
}
"""Reasons why weights that are right may not make the right update."""
Ranks = Sequence[WindowEvidence]
"""The evidence of one window on every rank."""
Own = MutableMapping[Hashable, tuple[float, ...]]
"""By loss: the weight that each of its terms has of its own, as right windows tell."""


def judge(
    ranks: Ranks,
    counts: Counts,
    name: str,
    own: Own,
) -> LoopTrial:
    """Return the verdict on one window; `ranks` has its evidence on every rank.

    `own` has what other windows have told of the losses, and a right window adds to it.
    """
    every = [micro for window in ranks for micro in window.backwards]
    lines = {**(every[0].lines if every else {}), "step": ranks[0].line}
    lines = {what: line for what, line in lines.items() if line}
    trial = LoopTrial(name, micro_batches=len(every), lines=lines)
    if ranks[0].ledger is not None:
        return _judged(trial, ranks, counts, own, None, None)
    if any(window.backwards[i].moved for window in ranks for i in window.cleared):
        return _not_judged(trial, "two passes")
    if ranks[0].is_brief:
        beside = findings_of(BESIDE, ranks)
        if beside:
            return trial.with_answer(DIFFERENT, findings=beside)
        return _not_judged(trial, "counted")
    parts = _parts(ranks)
    if len(parts) == 1:
        return _judged(trial, ranks, counts, own, *parts[0])
    whole = None
    if not are_of_two_losses(every):
        whole = _judged(trial, ranks, counts, own, None, None)
        if whole.answer == RIGHT:
            return whole
    own_parameters = set(ranks[0].indices)
    if len({micro.touched <= own_parameters for micro in every}) > 1:
        return _not_judged(trial, "reaches others")
    sizes = {len(row) for _, part in parts for row in part or ()}
    if len(sizes) > 1 or (sizes == {1} and not all(key in own for key, _ in parts)):
        return whole or _not_judged(trial, "two losses")
    size = sizes.pop()
    usual = max(1, counts.usual // len(parts))
    of_part = replace(counts, micro_batches=size, usual=usual, first=counts.first // len(parts))
    trials = [_judged(trial, ranks, of_part, own, key, part) for key, part in parts]
    wrong = [
        replace(t, findings=tuple(f.of_loss(_name_of(ranks, part)) for f in t.findings))
        for t, (_, part) in zip(trials, parts, strict=True)
        if t.answer == DIFFERENT
    ]
    not_judged = [t for t in trials if t.answer == NOT_JUDGED]
    return next(iter((*wrong, *not_judged, *trials)))


def _not_judged(trial: LoopTrial, name: str) -> LoopTrial:
    reason = _NO_ANSWER.get(name) or _DOUBTS[name]
    return trial.with_answer(NOT_JUDGED, f"{reason}: use wb.verify")


# ------------------------------------------------------------------- the losses of a window


def _parts(ranks: Ranks) -> list[tuple[Hashable, Part | None]]:
    """Return the losses of a window, each with the places of its backwards, by rank."""
    by_target = _have_targets([micro for window in ranks for micro in window.backwards])
    rows = [[_loss_of(m, reached=True, target=by_target) for m in w.backwards] for w in ranks]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return [
        (key, [[i for i, other in enumerate(row) if other == key] for row in rows]) for key in keys
    ] or [(None, None)]


def _have_targets(micros: Sequence[Backward]) -> bool:
    """True if every backward has one target for all samples; of a classifier, some may."""
    return all(any(target is not None for target in micro.targets) for micro in micros)


def _loss_of(micro: Backward, *, reached: bool, target: bool) -> Hashable:
    """Return what tells one loss from another: its operations, and the parameters it reaches."""
    return (micro.operations, micro.signs, reached and micro.touched, target and micro.targets)


def are_of_two_losses(micros: Sequence[Backward]) -> bool:
    """True if backwards differ in their operations, signs, or the one target of their samples."""
    target = _have_targets(micros)
    return len({_loss_of(micro, reached=False, target=target) for micro in micros}) > 1


def _name_of(ranks: Ranks, part: Part | None) -> str:
    """Return the line of a loss, or its operation."""
    window, places = ranks[0], part[0] if part else ()
    micro = window.backwards[places[0]]
    of = micro.lines.get("loss") or ", ".join(term.node for term in micro.terms)
    targets = {target for target in micro.targets if target is not None}
    return of + "".join(f", targets {target:g}" for target in targets)


def _judged(
    trial: LoopTrial,
    ranks: Ranks,
    counts: Counts,
    own: Own,
    key: Hashable,
    part: Part | None,
) -> LoopTrial:
    """Return the verdict on the backwards of one loss."""
    # A loss's own weight may grow with the windows; a short one has that of the first.
    known = own.get(key, ()) if counts.micro_batches != counts.first else ()
    weights = weights_of(ranks, counts, known, part)
    if isinstance(weights, Weights):
        trial = trial.with_weights(weights)
    findings = _findings(ranks, weights, counts)
    is_given = any(window.units for window in ranks)
    is_sum = (
        not is_given and trial.source == "weights" and "sums added" in [f.variant for f in findings]
    )
    if is_sum:
        findings = [finding for finding in findings if finding.is_beside]
    if findings:
        return trial.with_answer(DIFFERENT, findings=findings)
    if is_sum:
        return _not_judged(trial, "a sum")
    if isinstance(weights, Unknown):
        answer = DIFFERENT if weights.is_different else NOT_JUDGED
        return trial.with_answer(answer, weights.reason)
    if not weights.is_right and not _compares(ranks):
        return _unexplained(trial, weights, ranks, counts)
    doubts = _doubts(ranks, counts)
    first = next((name for name in _DOUBTS if name in doubts), "")
    if first:
        return _not_judged(trial, first)
    own.setdefault(key, weights.own)
    return trial.with_answer(RIGHT)


def _findings(ranks: Ranks, weights: Weights | Unknown, counts: Counts) -> list[Finding]:
    """Return all mistakes that explain the window, the one to begin with first."""
    is_right = isinstance(weights, Weights) and weights.is_right
    lost = is_lost(ranks)
    findings = [] if is_right and not lost else list(of_two_passes(ranks, counts))
    findings = findings or findings_of(SEEN, ranks)
    if not findings and lost:
        findings = findings_of(LOST, ranks)[:1]
    if not (findings or is_right or isinstance(weights, Unknown) or _compares(ranks)):
        findings = findings_of([same_twice], ranks) or explain(weights, counts)
    beside = findings_of(BESIDE, ranks)
    findings += [replace(finding, is_beside=bool(findings)) for finding in beside]
    # A mistake that several tables find is told once, by the first.
    return list({finding.key: finding for finding in reversed(findings)}.values())[::-1]


def _compares(ranks: Ranks) -> bool:
    """True if losses may compare samples: also with those of other micro-batches, kept without a
    graph, which makes each loss that of the whole batch.
    """
    return any(COMPARES in micro.doubts for window in ranks for micro in window.backwards)


def _doubts(ranks: Ranks, counts: Counts) -> set[str]:
    """Return what makes it doubtful that right weights make the right update."""
    every = [micro for window in ranks for micro in window.backwards]
    ledgers = [window.ledger for window in ranks if window.ledger is not None]
    penalties = [term for micro in every for term in micro.terms if term.kind == "penalty"]
    by = [scale.by for term in penalties for scale in term.scales]
    steps = (counts.micro_batches, 1 / max(counts.micro_batches, 1))
    is_divided = any(math.isclose(n, k, rel_tol=SAME_WEIGHT) for n in by for k in steps)
    carries = any(_carries(w.backwards) for w in ranks) or any(o.carries for o in ledgers)
    facts = {
        "alone": not ledgers and counts.usual == len(every) == 1,
        "carried": carries,
        "changed": any(ledger.is_changed for ledger in ledgers),
        "penalty": bool(penalties) and not is_divided,
    }
    noted = {name for micro in every for name in micro.doubts}
    return noted | {name for name, is_so in facts.items() if is_so}


def _carries(micros: Sequence[Backward]) -> bool:
    """True if an output of a micro-batch is an input of a later one.

    The losses of one micro-batch may share outputs: a discriminator's and a generator's.
    """
    by_number = {micro.number: micro for micro in micros}
    pairs = [(by_number[n], m) for m in micros for n in m.carried if n in by_number]
    return any(
        was.batch != now.batch
        or _loss_of(was, reached=True, target=True) == _loss_of(now, reached=True, target=True)
        for was, now in pairs
    )


def _unexplained(trial: LoopTrial, weights: Weights, ranks: Ranks, counts: Counts) -> LoopTrial:
    """Return the verdict on weights that are not right, and fit no known mistake."""
    reading = next(row[0] for row in weights.terms if row[0].off > SAME_WEIGHT)
    if reading.constant is None:
        if reading.is_mean_of_losses and math.isclose(
            sum(reading.weights), 1.0, rel_tol=SAME_WEIGHT
        ):
            variant = "weights that add up to 1, but are not the shares of the units"
            return trial.with_answer(DIFFERENT, findings=[Finding("other-units", variant)])
        total = sum(reading.units)
        times = [w * total / u for w, u in zip(reading.weights, reading.units, strict=True) if u]
        gone = [str(i) for i, number in enumerate(times, start=1) if abs(number) < SAME_WEIGHT]
        if gone:
            lost = Finding("left-out", f"number {', '.join(gone)} of {len(times)} does not count")
            return trial.with_answer(DIFFERENT, findings=[lost])
        shown = ", ".join(f"{number:.3g}" for number in times[:8]) + ", ..." * (len(times) > 8)
        reason = f"the micro-batches count {shown} times as much as they must; cause not known"
        return trial.with_answer(NOT_JUDGED, f"{reason}: use wb.verify")
    total = sum(reading.units)
    by = total / reading.constant
    others = other_counts([[micro.counted for micro in window.backwards] for window in ranks])
    counted = {name: sum(map(sum, rows)) for name, rows in others.items()}
    counted["the units of one rank"] = total / counts.ranks
    name = next((n for n, number in counted.items() if math.isclose(number, by)), "")
    if name == NOT_SHIFTED:
        variant = f"divided by {by:g}, the {name}, where the loss counts {total:g}"
        return trial.with_answer(DIFFERENT, findings=[Finding("other-units", variant)])
    what = f"which are the {name}" if name else "and what it counts is not known"
    return trial.with_answer(
        NOT_JUDGED,
        f"the loss is divided by {by:.6g} where {total:.6g} units came, {what}: use wb.verify, or "
        "give the units to wb.Accumulator",
    )
