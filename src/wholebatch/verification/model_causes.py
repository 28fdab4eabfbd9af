"""Name the causes of a difference between accumulation and the undivided batch.

Each question is put to the model itself, in an order in which an answer excludes what comes after:
does it repeat itself, does the order of the samples matter, does the test of the entry points find
a cause (by type, and by halves), does any weighting of the micro-batches give the undivided batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.batch import to_device
from wholebatch.coupled.adds_up import audit
from wholebatch.coupled.causes import AuditFinding
from wholebatch.coupled.coupling_layers import layers_by_type
from wholebatch.coupled.normalisation_layers import batchnorms as batchnorms_of
from wholebatch.coupled.normalisation_layers import uses_batch_statistics
from wholebatch.readable_sizes import percent
from wholebatch.verification.model_runs import DividedBatch, ModelRuns
from wholebatch.verification.observed_window import WindowRun
from wholebatch.verification.run_comparison import Comparison, distance, fit_of
from wholebatch.verification.verdicts import Cause, cause


@dataclass(frozen=True)
class Measurements:
    """The measurements of a proof, and the runs to measure more."""

    runs: ModelRuns
    batch: DividedBatch
    whole: WindowRun
    again: WindowRun
    permuted: Sequence[WindowRun]
    gradient: Comparison
    float64: Comparison | None = None


def diagnose(evidence: Measurements) -> list[Cause]:
    """Return the causes that were found, the one to begin with first."""
    questions = [_repeats, _order, _audited, _weights, _audited_loss]
    if evidence.float64 is not None and evidence.float64.same:  # only rounding can be the cause
        questions = [_repeats]
    elif evidence.runs.is_sharded:  # a forward alone is a collective that all must join
        questions = [_repeats, _order]
    for question in questions:
        causes = list(question(evidence))
        if causes:
            return causes
    return [_unexplained(evidence)]


def _repeats(evidence: Measurements) -> Iterator[Cause]:
    """Ask if the same start and the same random numbers give the same gradient twice."""
    apart = distance(evidence.again.gradients, evidence.whole.gradients, evidence.runs.devices)
    if not apart <= evidence.gradient.tolerance / 2:
        yield cause("repeats", apart=percent(apart))


def _order(evidence: Measurements) -> Iterator[Cause]:
    """Ask if another order of the samples matters."""
    whole, devices = evidence.whole.gradients, evidence.runs.devices
    apart = max(distance(run.gradients, whole, devices) for run in evidence.permuted)
    if not apart <= evidence.gradient.tolerance:
        yield cause("order", apart=percent(apart))
        yield from _audited(evidence)


_OF_THE_LOSS = ("loss", "gradient")
_KINDS = {
    **dict.fromkeys(("mean", "sum", "units", "added"), "a mean of means"),
    **dict.fromkeys(_OF_THE_LOSS, "a loss that does not decompose"),
    **dict.fromkeys(("state", "outside", "spectral", "running"), "a stateful module"),
    "custom": "BatchNorm of its own kind",
}
"""The name of each kind of finding in a verdict; kinds that are not here are coupled samples."""


def _findings(evidence: Measurements) -> list[AuditFinding]:
    """Return what the test of the entry points finds: by type, by changing a sample, by halves."""
    runs, batch = evidence.runs, evidence.batch
    runs.begin()
    few = to_device(batch.first(min(8, batch.samples)).whole, runs.parameters[0].device)

    def run(batch: Any) -> Any:
        with torch.enable_grad():  # a loss checks that it has a gradient
            return runs.loss(runs.inner, batch)

    try:
        return audit(runs.inner, few, run)
    except Exception:  # a loss that needs the whole batch: what the types tell is left
        return layers_by_type(runs.inner)
    finally:
        runs.begin()


def _audited(evidence: Measurements) -> Iterator[Cause]:
    """Ask for layers that couple samples, state that moves, and means that are given as sums.

    A loss that does not add up is asked by least squares first, which tell its weights.
    """
    policy, findings = evidence.runs.batchnorm, _findings(evidence)
    norms = [f.name for f in findings if f.kind in ("batchnorm", "custom", "sync")]
    if norms and policy == "allow":
        yield cause("batchnorm", norms, policy=policy)
    others = {"batchnorm", "sync", *_OF_THE_LOSS} | (set() if policy == "exact" else {"custom"})
    yield from _named([finding for finding in findings if finding.kind not in others])


def _audited_loss(evidence: Measurements) -> Iterator[Cause]:
    """Ask if the loss of some samples is that of their parts."""
    yield from _named([one for one in _findings(evidence) if one.kind in _OF_THE_LOSS])


def _named(findings: Sequence[AuditFinding]) -> Iterator[Cause]:
    by_kind: dict[str, list[AuditFinding]] = {}
    for finding in findings:
        by_kind.setdefault(_KINDS.get(finding.kind, "coupled samples"), []).append(finding)
    for kind, found in by_kind.items():
        # "the loss function" is no module.
        where = tuple(one.name for one in found if " " not in one.name)
        yield Cause(kind, where, found[0].advice, "")


def _freeze_norms(model: nn.Module) -> None:
    for _, module in batchnorms_of(model):
        module.training = False


def _weights(evidence: Measurements) -> Iterator[Cause]:
    """Ask about the loss; BatchNorms are frozen for it, since they couple samples themselves."""
    runs = evidence.runs
    runs.begin()
    _freeze_norms(runs.model)
    if any(uses_batch_statistics(module) for _, module in batchnorms_of(runs.model)):
        return
    runs.silences.append(_freeze_norms)
    try:
        yield from _weighing(evidence)
    finally:
        runs.silences.pop()


def _weighing(evidence: Measurements) -> Iterator[Cause]:
    """Ask which weights of the micro-batches' gradients make that of the undivided batch."""
    runs = evidence.runs
    parts = [*evidence.batch.micro_batches()[:64], evidence.batch.whole]
    terms = [list(runs.gradients_of_terms(part).values()) for part in parts]
    *micros, whole = [
        [_added(column) for column in zip(*(row for row, _ in one), strict=True)] for one in terms
    ]
    weights, left = fit_of(micros, whole)
    *counts, whole_units = [one[0][1] for one in terms]
    total = sum(counts)
    # A fit of few vectors to many numbers leaves nothing only where it is the truth.
    if left > max(1e3 * runs.unit, 10 * evidence.gradient.tolerance):
        yield cause("decompose", left=percent(left))
    elif abs(total - whole_units) > 1e-6 * max(total, 1.0):
        yield cause("units", total=total, whole=whole_units)
    elif max(abs(weight - 1.0) for weight in weights) > 1e-3:
        shown = ", ".join(f"{weight:.3g}" for weight in weights[:6])
        yield cause("weights", weights=shown + ", ..." * (len(weights) > 6))


def _added(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of one parameter's gradients of all terms."""
    parts = [one for one in gradients if one is not None]
    return torch.stack(parts).sum(0) if parts else None


def _unexplained(evidence: Measurements) -> Cause:
    if evidence.float64 is not None and evidence.float64.same:
        return cause("rounding", apart=percent(evidence.float64.distance))
    return cause("unexplained", [line.name for line in evidence.gradient.differing[:4]])
