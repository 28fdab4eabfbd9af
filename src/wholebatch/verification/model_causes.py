"""Why accumulation differs from the undivided batch: evidence, then weights, then explanations.

`ModelEvidence` is what a proof has measured. The weights are those that the undivided batch gives
to the totals of its micro-batches, by the loss function itself. `_EXPLANATIONS` is the table: the
first that finds a cause ends the search, since each excludes what comes after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.audit.adds_up import check_adds_up
from wholebatch.audit.finding import UNTESTED, AuditFinding
from wholebatch.audit.layers import layers_by_type
from wholebatch.batch import to_device
from wholebatch.batch.samples import readable_layout
from wholebatch.coupled.normalisation_layers import batchnorms, uses_batch_statistics
from wholebatch.readable_sizes import percent
from wholebatch.verification.coupled_layers import layers_that_couple
from wholebatch.verification.distances import TIMES_THE_FLOOR, Comparison, fit_of
from wholebatch.verification.divided_batch import DividedBatch
from wholebatch.verification.findings import Finding
from wholebatch.verification.model_runs import ModelRuns
from wholebatch.verification.parameter_rows import ParameterRows
from wholebatch.verification.weights import SAME_WEIGHT

_MOST_PARTS = 64
"""Micro-batches whose weights are fitted."""


@dataclass(frozen=True, eq=False)
class TotalWeights:
    """The weights that the undivided batch gives to its micro-batches' totals, in least squares."""

    values: tuple[float, ...]
    left: float
    """The share of the undivided batch's gradient that no weights explain."""
    units: float
    """Of all micro-batches together."""
    units_of_all: float
    """Of the undivided batch."""


@dataclass(frozen=True, eq=False)
class ModelEvidence:
    """What a proof has measured of a model, and the runs to measure more when it is asked for."""

    runs: ModelRuns
    batch: DividedBatch
    gradient: Comparison
    float64: Comparison | None
    drawn: str
    """The random numbers that could not be switched off, in words."""
    again_off: float
    """The distance of the undivided batch from itself when it is run again."""
    reordered_off: float
    """Its distance from itself with the samples in other orders."""

    @property
    def may_run_alone(self) -> bool:
        """False for shards: a forward alone is a collective that all ranks must join."""
        return not self.runs.is_sharded

    @cached_property
    def audited(self) -> list[AuditFinding]:
        """What the test of the entry points finds: by type, by changing a sample, by halves."""
        runs, batch = self.runs, self.batch
        if not self.may_run_alone:
            return []
        runs.begin()
        few = to_device(batch.first(min(8, batch.samples)).whole, runs.device)

        def run(batch: Any) -> Any:
            with torch.enable_grad():  # a loss checks that it has a gradient
                return runs.loss(runs.inner, batch)

        findings, layout = layers_by_type(runs.inner), readable_layout(few, None, ())
        try:
            tested = check_adds_up(runs.inner, run, layout).findings
            if layout is not None and any(each.kind == "loss" for each in tested):
                tested = tuple(layers_that_couple(runs.inner, run, layout)) or tested
            return findings + [each for each in tested if each.kind not in UNTESTED]
        except Exception:  # a loss that needs the whole batch: what the types tell is left
            return findings
        finally:
            runs.begin()

    @cached_property
    def weights(self) -> TotalWeights | None:
        """The weights of the micro-batches; BatchNorms, which couple samples, are frozen for it."""
        runs = self.runs
        runs.begin()
        _freeze_norms(runs.model)
        norms = [module for _, module in batchnorms(runs.model)]
        if not self.may_run_alone or any(map(uses_batch_statistics, norms)):
            return None
        micros = self.batch.micro_batches()[:_MOST_PARTS]
        runs.silences.append(_freeze_norms)
        try:
            parts = [_total_of(runs, part) for part in (*micros, self.batch.whole)]
        finally:
            runs.silences.pop()
        *added, whole = [row for row, _ in parts]
        *units, of_all = [count for _, count in parts]
        values, left = fit_of(added, whole)
        return TotalWeights(tuple(values), left, sum(units), of_all)


def _total_of(runs: ModelRuns, batch: Any) -> tuple[Tensor, float]:
    """Return some numbers of the gradient of a batch's total, and the units of its first term."""
    rows = ParameterRows()
    rows.adopt(runs.model)
    terms = runs.gradients_of_terms(batch)
    row = torch.stack([rows.sample_named(by_name) for by_name, _ in terms.values()]).sum(0)
    return row, next(iter(terms.values()))[1]


def _freeze_norms(model: nn.Module) -> None:
    for _, module in batchnorms(model):
        module.training = False


def causes(evidence: ModelEvidence) -> list[Finding]:
    """Return the causes of a difference, the one to begin with first."""
    return next(filter(None, (list(explain(evidence)) for explain in _EXPLANATIONS)), [])


# ------------------------------------------------------------------- the table of explanations


def _randomness(evidence: ModelEvidence) -> Iterator[Finding]:
    if evidence.drawn:
        yield Finding("randomness", f"{evidence.drawn} for the batch that it gets")


def _repeats(evidence: ModelEvidence) -> Iterator[Finding]:
    off = evidence.again_off
    if not off <= evidence.gradient.tolerance / 2:
        variant = (
            f"the undivided batch, run twice from the same start, is {percent(off)} from itself"
        )
        yield Finding("not-deterministic", variant)


def _rounding(evidence: ModelEvidence) -> Iterator[Finding]:
    if evidence.float64 is not None and evidence.float64.same:
        off = percent(evidence.float64.distance)
        yield Finding("rounding", f"in float64 the two are the same ({off})")


def _order(evidence: ModelEvidence) -> Iterator[Finding]:
    off = evidence.reordered_off
    if not off <= evidence.gradient.tolerance:
        variant = (
            f"the undivided batch with its samples in another order is {percent(off)} from itself"
        )
        yield Finding("order-of-samples", variant)
        yield from _audited(evidence)


_OF_THE_LOSS = ("loss", "gradient")
_KEYS = {
    **dict.fromkeys(("mean", "sum", "units", "added"), "mean-of-means"),
    **dict.fromkeys(_OF_THE_LOSS, "not-decomposed"),
    **dict.fromkeys(("state", "outside", "spectral", "running"), "stateful-module"),
    "custom": "batchnorm",
}
"""The mistake that each kind of finding of the test is; kinds that are not here are coupled."""


def _audited(evidence: ModelEvidence) -> Iterator[Finding]:
    """Find layers that couple samples, state that moves, and means that are given as sums.

    The weights tell more of a loss that does not add up, so they come first.
    """
    policy = evidence.runs.batchnorm
    norms = [f.name for f in evidence.audited if f.kind in ("batchnorm", "custom", "sync")]
    if norms and policy == "allow":
        yield Finding("batchnorm", f'batchnorm="{policy}" lets it', tuple(norms))
    others = {"batchnorm", "sync", *_OF_THE_LOSS} | (set() if policy == "exact" else {"custom"})
    yield from _named([finding for finding in evidence.audited if finding.kind not in others])


def _audited_loss(evidence: ModelEvidence) -> Iterator[Finding]:
    yield from _named([finding for finding in evidence.audited if finding.kind in _OF_THE_LOSS])


def _named(audited: Sequence[AuditFinding]) -> Iterator[Finding]:
    by_key: dict[str, list[AuditFinding]] = {}
    for finding in audited:
        by_key.setdefault(_KEYS.get(finding.kind, "coupled"), []).append(finding)
    for key, same in by_key.items():
        names = [finding.name for finding in same]
        where = tuple(name for name in names if " " not in name)  # "the loss" is no module
        yield Finding(key, "", where, advice=same[0].advice)


_RETURN_UNITS = (
    "return the sum and its units, wb.Loss(total, units), or a mean through wb.mean_loss(mean, "
    "units). If it does, the units may count something else than the mean is over: "
    "units=(labels != -100).sum(), or return wb.cross_entropy(logits, labels)"
)


def _weighed(evidence: ModelEvidence) -> Iterator[Finding]:
    weights = evidence.weights
    if weights is None:
        return
    # A fit of few rows to many numbers leaves nothing only where it is the truth.
    limit = max(1e3 * evidence.runs.scale.unit, TIMES_THE_FLOOR * evidence.gradient.tolerance)
    if weights.left > limit:
        yield Finding(
            "not-decomposed",
            "no weighting of the micro-batches' gradients gives the undivided batch's: "
            f"{percent(weights.left)} of it remains",
        )
    elif abs(weights.units - weights.units_of_all) > 1e-6 * max(weights.units, 1.0):
        variant = (
            f"the micro-batches have {weights.units:g} units together, the undivided batch "
            f"{weights.units_of_all:g}: the loss does not return a sum and its units"
        )
        yield Finding("mean-of-means", variant, advice=_RETURN_UNITS)
    elif max(abs(weight - 1.0) for weight in weights.values) > SAME_WEIGHT:
        shown = ", ".join(f"{weight:.3g}" for weight in weights.values[:6])
        shown += ", ..." * (len(weights.values) > 6)
        variant = (
            f"the undivided batch weighs its micro-batches' totals by {shown}, and sums would all "
            "have weight 1"
        )
        yield Finding("other-units", variant, advice=_RETURN_UNITS)


def _unexplained(evidence: ModelEvidence) -> Iterator[Finding]:
    yield Finding("unexplained", "", tuple(line.name for line in evidence.gradient.differing[:4]))


_EXPLANATIONS: tuple[Callable[[ModelEvidence], Iterator[Finding]], ...] = (
    *(_randomness, _repeats, _rounding, _order),
    *(_audited, _weighed, _audited_loss, _unexplained),
)
