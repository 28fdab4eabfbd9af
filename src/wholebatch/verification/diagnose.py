"""The causes of a difference between the accumulated update and that of the undivided batch.

Each question is put to the model itself, in an order in which an answer excludes what comes after:
does it repeat itself, does it keep a state, do its layers couple samples, does its loss weigh the
micro-batches as it says, does it decompose at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.core.forward_state import restore_random
from wholebatch.core.splitting import to_device
from wholebatch.coupled.audit import Audit, audit
from wholebatch.coupled.normalisation_layers import batchnorms as batchnorms_of
from wholebatch.coupled.normalisation_layers import uses_batch_statistics
from wholebatch.verification.model_runs import DividedBatch, ModelRuns
from wholebatch.verification.observed_window import WindowRun
from wholebatch.verification.run_comparison import Comparison, distance, fit_of, listed, percent
from wholebatch.verification.undivided_batch import objective
from wholebatch.verification.verdicts import Cause, cause


@dataclass(frozen=True)
class Evidence:
    """The measurements of a proof, and the runs to measure more."""

    runs: ModelRuns
    batch: DividedBatch
    whole: WindowRun
    again: WindowRun
    permuted: Sequence[WindowRun]
    gradient: Comparison
    float64: Comparison | None = None


def diagnose(evidence: Evidence) -> list[Cause]:
    """Return the causes that were found, the one to begin with first."""
    questions = [_repeats, _order, _state, _coupling, _weights, _left_moved]
    if evidence.float64 is not None and evidence.float64.same:  # only rounding can be the cause
        questions = [_repeats]
    elif evidence.runs.is_sharded:  # a forward alone is a collective that all must join
        questions = [_repeats, _order]
    for question in questions:
        causes = list(question(evidence))
        if causes:
            return causes
    return [_unexplained(evidence)]


def _repeats(evidence: Evidence) -> Iterator[Cause]:
    """Ask if the same start and the same random numbers give the same gradient twice."""
    apart = distance(evidence.again.gradients, evidence.whole.gradients, evidence.runs.devices)
    if not apart <= evidence.gradient.tolerance / 2:
        yield cause("repeats", apart=percent(apart))


def _order(evidence: Evidence) -> Iterator[Cause]:
    """Ask if another order of the samples matters."""
    whole, devices = evidence.whole.gradients, evidence.runs.devices
    apart = max(distance(run.gradients, whole, devices) for run in evidence.permuted)
    if not apart <= evidence.gradient.tolerance:
        yield cause("order", apart=percent(apart))
        yield from _coupling(evidence)


def _state(evidence: Evidence) -> Iterator[Cause]:
    """Ask if a second forward, from where the first has left the modules, has the same gradient.

    The same loss is not enough: power iterations of a spectral norm hardly move it.
    """
    runs = evidence.runs
    micro = evidence.batch.micro_batches()[0]
    with _norms_frozen(runs):
        first, gradients = _mean(runs, micro)
        moved = _moved(runs, same=_close)
        restore_random(runs.start.random)
        second, again = _mean(runs, micro)
    apart = distance(again, gradients, runs.devices)
    same_loss = abs(second - first) <= 100 * runs.unit * max(abs(first), 1e-30)
    if not (same_loss and apart <= evidence.gradient.tolerance):
        yield cause("state", moved, apart=percent(apart), first=first, second=second)


def _left_moved(evidence: Evidence) -> Iterator[Cause]:
    """Ask if a forward moves anything at all: one forward may move it too little to show."""
    runs = evidence.runs
    with _norms_frozen(runs):
        _mean(runs, evidence.batch.micro_batches()[0])
        moved = _moved(runs, same=_equal)
    if moved:
        yield cause("moved", moved)


@contextmanager
def _norms_frozen(runs: ModelRuns) -> Iterator[None]:
    """Keep BatchNorms in evaluation mode: another check looks at their statistics."""
    runs.begin()
    _freeze_norms(runs.model)
    try:
        yield
    finally:
        runs.begin()


def _freeze_norms(model: nn.Module) -> None:
    for _, module in batchnorms_of(model):
        module.training = False


def _mean(runs: ModelRuns, micro: Any) -> tuple[float, tuple[Tensor | None, ...]]:
    """Return the mean loss of a micro-batch from where the modules are now, and its gradient."""
    mean = objective(runs.inner, runs.loss, micro, runs.numbers).mean()
    gradients = torch.autograd.grad(mean, runs.parameters, allow_unused=True)
    return float(mean.detach()), tuple(g if g is None else g.to_dense() for g in gradients)


def _moved(runs: ModelRuns, *, same: Callable[[Tensor, Tensor], bool]) -> list[str]:
    """Return the buffers and plain attributes that differ from the start."""
    start = runs.start
    names = [
        name
        for name, buffer in runs.model.named_buffers()
        if not (start.knows(buffer) and same(buffer, start.before(buffer)))
    ]
    return names + start.changed_attributes()


def _coupling(evidence: Evidence) -> Iterator[Cause]:
    """Ask for layers whose output for a sample depends on the others of its batch."""
    runs = evidence.runs
    if runs.batchnorm in ("group", "layer", "freeze"):
        return
    found = _audit(evidence).findings
    norms = [f for f in found if f.kind in ("batchnorm", "custom", "sync")]
    custom = [f for f in norms if f.kind == "custom"]
    other = [f for f in found if f.kind == "probe"]
    if other:
        yield cause("coupled", [f.name for f in other], advice=other[0].advice)
    if norms and runs.batchnorm != "exact":
        yield cause("batchnorm", [f.name for f in norms], policy=runs.batchnorm)
    elif custom and not other:
        yield cause("own-batchnorm", [f.name for f in custom], advice=custom[0].advice)


def _audit(evidence: Evidence) -> Audit:
    runs, batch = evidence.runs, evidence.batch
    runs.begin()
    few = to_device(batch.first(min(8, batch.samples)).whole, runs.parameters[0].device)

    def forward(model: nn.Module, batch: Any) -> Any:
        with torch.enable_grad():  # a loss checks that it has a gradient
            return runs.loss(model, batch)

    try:
        return audit(runs.inner, few, forward=forward)
    except Exception:  # a loss that needs the whole batch: what the types tell is left
        return audit(runs.inner)


def _weights(evidence: Evidence) -> Iterator[Cause]:
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


def _weighing(evidence: Evidence) -> Iterator[Cause]:
    """Ask which weights of the micro-batches' gradients make that of the undivided batch."""
    runs = evidence.runs
    micros = [runs.gradient_of(micro) for micro in evidence.batch.micro_batches()[:64]]
    whole, whole_units = runs.gradient_of(evidence.batch.whole)
    weights, left = fit_of([gradient for gradient, _ in micros], whole)
    total = sum(units[0] for _, units in micros)
    # A fit of few vectors to many numbers leaves nothing only where it is the truth.
    if left > max(1e3 * runs.unit, 10 * evidence.gradient.tolerance):
        yield cause("decompose", left=percent(left))
    elif abs(total - whole_units[0]) > 1e-6 * max(total, 1.0):
        yield cause("units", total=total, whole=whole_units[0])
    elif max(abs(weight - 1.0) for weight in weights) > 1e-3:
        shown = ", ".join(f"{weight:.3g}" for weight in weights[:6])
        yield cause("weights", weights=shown + ", ..." * (len(weights) > 6))


def _unexplained(evidence: Evidence) -> Cause:
    if evidence.float64 is not None and evidence.float64.same:
        return cause("rounding", apart=percent(evidence.float64.distance))
    return cause("unexplained", [line.name for line in evidence.gradient.differing[:4]])


def moved_buffers(
    runs: ModelRuns, batch: DividedBatch, left: Mapping[str, Tensor]
) -> Iterator[str]:
    """Yield a note on buffers that the window `left` otherwise than the undivided batch does."""
    if not left:
        return
    runs.whole(batch.whole)
    moved = [
        name
        for name, buffer in runs.model.named_buffers()
        if name in left and left[name].shape == buffer.shape and not _close(left[name], buffer)
    ]
    if moved:
        yield (
            f"the buffers {listed(moved)} are left otherwise than by the undivided batch: they "
            "move with every forward, and later updates may depend on them"
        )


def _equal(ours: Tensor, other: Tensor) -> bool:
    return torch.equal(ours.cpu(), other.cpu())


def _close(ours: Tensor, other: Tensor) -> bool:
    if not ours.is_floating_point():
        return _equal(ours, other)
    left, right = ours.double().cpu(), other.detach().double().cpu()
    size = float(right.abs().max()) if right.numel() else 0.0
    tolerance = 100 * torch.finfo(ours.dtype).eps
    return bool(((left - right).abs() <= tolerance * max(size, 1e-30)).all())
