"""Why accumulation differs from the undivided batch.

`ModelEvidence` is what a proof has measured. `_EXPLANATIONS` is the table: the first that finds a
cause ends the search, since each excludes what comes after it. The test of the entry points, which
refuses a loss that does not add up, is asked last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from wholebatch.audit.adds_up import check_adds_up
from wholebatch.audit.finding import UNTESTED, AuditFinding
from wholebatch.audit.layers import layers_by_type
from wholebatch.batch import to_device
from wholebatch.batch.samples import readable_layout
from wholebatch.readable_sizes import percent
from wholebatch.verification.coupled_layers import layers_that_couple
from wholebatch.verification.distances import Comparison
from wholebatch.verification.divided_batch import DividedBatch
from wholebatch.verification.findings import Finding
from wholebatch.verification.model_runs import ModelRuns


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


_KEYS = {
    **dict.fromkeys(("mean", "sum", "units"), "mean-of-means"),
    **dict.fromkeys(("loss", "gradient", "added"), "not-decomposed"),
    **dict.fromkeys(("state", "outside", "spectral", "running"), "stateful-module"),
    "custom": "batchnorm",
}
"""The mistake that each kind of finding of the test is; kinds that are not here are coupled."""


def _audited(evidence: ModelEvidence) -> Iterator[Finding]:
    """Find layers that couple samples, state that moves, and losses that do not add up."""
    policy = evidence.runs.batchnorm
    norms = [f.name for f in evidence.audited if f.kind in ("batchnorm", "custom", "sync")]
    if norms and policy == "allow":
        yield Finding("batchnorm", f'batchnorm="{policy}" lets it', tuple(norms))
    others = {"batchnorm", "sync"} | (set() if policy == "exact" else {"custom"})
    yield from _named([finding for finding in evidence.audited if finding.kind not in others])


def _named(audited: Sequence[AuditFinding]) -> Iterator[Finding]:
    by_key: dict[str, list[AuditFinding]] = {}
    for finding in audited:
        by_key.setdefault(_KEYS.get(finding.kind, "coupled"), []).append(finding)
    for key, same in by_key.items():
        names = [finding.name for finding in same]
        where = tuple(name for name in names if " " not in name)  # "the loss" is no module
        if key == "not-decomposed":  # the numbers; its cures lead here
            yield Finding(key, same[0].advice.partition(":\n")[0], where)
        else:
            yield Finding(key, "", where, advice=same[0].advice)


def _unexplained(evidence: ModelEvidence) -> Iterator[Finding]:
    yield Finding("unexplained", "", tuple(line.name for line in evidence.gradient.differing[:4]))


_EXPLANATIONS: tuple[Callable[[ModelEvidence], Iterator[Finding]], ...] = (
    *(_randomness, _repeats, _rounding, _order),
    *(_audited, _unexplained),
)
