"""Why the accumulated update is not that of the undivided batch.

Each question is put to the model itself, in an order in which an answer excludes what comes after:
does it repeat itself, does it keep a state, do its layers couple samples, does its loss weigh the
micro-batches as it says, does it decompose at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.core.forward_state import restore_random
from wholebatch.core.splitting import to_device
from wholebatch.coupled.audit import Audit, audit
from wholebatch.coupled.normalisation_layers import batchnorms as batchnorms_of
from wholebatch.coupled.normalisation_layers import uses_batch_statistics
from wholebatch.verification.batch_reading import Reading
from wholebatch.verification.observed_window import Run
from wholebatch.verification.run_distance import Comparison, distance
from wholebatch.verification.undivided_batch import objective
from wholebatch.verification.verdict import Cause, said
from wholebatch.verification.window_runs import Bench

__all__ = ["Evidence", "diagnose"]


@dataclass(frozen=True)
class Evidence:
    """What the proof has measured, and the bench to measure more on."""

    bench: Bench
    batch: Any
    micro_batch: Any
    reading: Reading
    whole: Run
    again: Run
    permuted: Sequence[Run]
    gradient: Comparison
    update: Comparison
    float64: Comparison | None
    state: Mapping[str, Tensor]

    def what_moved_otherwise(self) -> list[str]:
        """Buffers that the window left otherwise than the undivided batch does."""
        if not self.state:
            return []
        self.bench.whole(self.batch)
        moved = []
        for name, buffer in self.bench.model.named_buffers():
            ours = self.state.get(name)
            if ours is not None and ours.shape == buffer.shape and not _close(ours, buffer):
                moved.append(name)
        if not moved:
            return []
        shown = ", ".join(moved[:4]) + (f" and {len(moved) - 4} more" if len(moved) > 4 else "")
        return [
            f"the buffers {shown} are left otherwise than by the undivided batch: they move with "
            "every forward, and later updates may depend on them"
        ]


def diagnose(evidence: Evidence) -> list[Cause]:
    """The causes that were found, the one to begin with first."""
    questions = [_repeats, _order, _state, _coupling, _weights, _left_moved]
    if evidence.float64 is not None and evidence.float64.same:  # only rounding can be the cause
        questions = [_repeats]
    elif evidence.bench.is_sharded:  # a forward alone is a collective that all must join
        questions = [_repeats, _order]
    for question in questions:
        causes = question(evidence)
        if causes:
            return causes
    return [_unexplained(evidence)]


def _repeats(evidence: Evidence) -> list[Cause]:
    """Twice the same start and the same numbers must give the same gradient."""
    apart = distance(evidence.again.gradients, evidence.whole.gradients, evidence.bench.devices)
    if apart <= evidence.gradient.tolerance / 2:
        return []
    return [
        Cause(
            "non-determinism",
            (),
            f"the undivided batch, run twice from the same start, is {said(apart)} from itself",
            "torch.use_deterministic_algorithms(True) names the operation; a forward that reads "
            "the clock, a global counter or an unseeded generator does this too",
        )
    ]


def _order(evidence: Evidence) -> list[Cause]:
    """Another order of the samples must not matter."""
    apart = max(
        distance(run.gradients, evidence.whole.gradients, evidence.bench.devices)
        for run in evidence.permuted
    )
    if apart <= evidence.gradient.tolerance:
        return []
    return [
        Cause(
            "order of the samples",
            (),
            f"the undivided batch with its samples in another order is {said(apart)} from itself",
            "the loss or a layer depends on where a sample stands; no division can keep that",
        ),
        *_coupling(evidence),
    ]


def _state(evidence: Evidence) -> list[Cause]:
    """A second forward from where the first has left the modules must give the same gradient.

    Not only the same loss: power iterations of a spectral norm hardly move it.
    """
    bench = evidence.bench
    device = bench.parameters[0].device
    micro = evidence.reading.split(evidence.batch, evidence.micro_batch)[0]
    with _norms_frozen(bench):
        first, gradients = _mean(bench, micro, device)
        moved = _moved(bench)
        restore_random(bench.start.random)
        second, again = _mean(bench, micro, device)
    apart = distance(again, gradients, bench.devices)
    unit = bench.numbers.unit(bench.model)
    same_loss = abs(second - first) <= 100 * unit * max(abs(first), 1e-30)
    if same_loss and apart <= evidence.gradient.tolerance:
        return []
    return [
        Cause(
            "a stateful module",
            tuple(moved),
            f"the same micro-batch, forwarded a second time, has a gradient {said(apart)} from the "
            f"first and the loss {second:.6g} after {first:.6g}: the forward changes what the next "
            "one computes",
            _KEEP_STATE_OUT,
        )
    ]


_KEEP_STATE_OUT = "move the state once per update (an after-step hook), or keep it out of the loss"


def _left_moved(evidence: Evidence) -> list[Cause]:
    """What a forward moves, where nothing else was found: one forward may move it too little."""
    bench = evidence.bench
    micro = evidence.reading.split(evidence.batch, evidence.micro_batch)[0]
    with _norms_frozen(bench):
        _mean(bench, micro, bench.parameters[0].device)
        moved = _moved(bench, same=_equal)
    if not moved:
        return []
    return [
        Cause(
            "a stateful module",
            tuple(moved),
            "every forward moves it, by little, and nothing else was found that could differ",
            _KEEP_STATE_OUT,
        )
    ]


class _norms_frozen:
    """BatchNorms in evaluation mode: their state is known, and asked for elsewhere."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def __enter__(self) -> None:
        self._bench.begin()
        _freeze_norms(self._bench.model)

    def __exit__(self, *error: object) -> None:
        self._bench.begin()


def _mean(
    bench: Bench, micro: Any, device: torch.device
) -> tuple[float, tuple[Tensor | None, ...]]:
    """The mean loss of a micro-batch from where the modules are now, and its gradient."""
    mean = objective(bench.inner, bench.loss, to_device(micro, device), bench.numbers).mean()
    gradients = torch.autograd.grad(mean, bench.parameters, allow_unused=True)
    return float(mean.detach()), tuple(g if g is None else g.to_dense() for g in gradients)


def _moved(bench: Bench, *, same: Callable[[Tensor, Tensor], bool] | None = None) -> list[str]:
    """Buffers and plain attributes that differ from the start."""
    model = bench.model
    names = [
        name
        for name, buffer in model.named_buffers()
        if not (bench.start.knows(buffer) and (same or _close)(buffer, bench.start.before(buffer)))
    ]
    return names + bench.start.changed_attributes()


def _coupling(evidence: Evidence) -> list[Cause]:
    """Layers whose output for a sample depends on the others of its batch."""
    bench = evidence.bench
    if bench.batchnorm in ("group", "layer", "freeze"):
        return []
    found = _audit(evidence)
    norms = [f for f in found.findings if f.kind in ("batchnorm", "custom", "sync")]
    other = [f for f in found.findings if f.kind == "probe"]
    causes = []
    if other:
        causes.append(
            Cause(
                "coupled samples",
                tuple(f.name for f in other),
                "the output for one sample moves when another sample of the batch changes",
                other[0].advice,
            )
        )
    if norms and bench.batchnorm != "exact":
        causes.append(
            Cause(
                "BatchNorm",
                tuple(f.name for f in norms),
                f'batchnorm="{bench.batchnorm}" normalises each micro-batch with its own '
                "statistics, the undivided batch with those of all samples",
                'batchnorm="exact" makes the update of the undivided batch',
            )
        )
    elif norms and not other:
        custom = [f for f in norms if f.kind == "custom"]
        if custom:
            causes.append(
                Cause(
                    "BatchNorm of its own kind",
                    tuple(f.name for f in custom),
                    "it normalises with the statistics of its batch by code of its own",
                    custom[0].advice,
                )
            )
    return causes


def _audit(evidence: Evidence) -> Audit:
    bench = evidence.bench
    bench.begin()
    size = min(8, evidence.reading.size(evidence.batch))
    few, _ = evidence.reading.first(evidence.batch, size)
    few = to_device(few, bench.parameters[0].device)

    def forward(model: nn.Module, batch: Any) -> Any:
        with torch.enable_grad():  # a loss checks that it has a gradient
            return bench.loss(model, batch)

    try:
        return audit(bench.inner, few, forward=forward)
    except Exception:  # a loss that needs the whole batch: what the types tell is left
        return audit(bench.inner)


def _weights(evidence: Evidence) -> list[Cause]:
    """Ask about the loss; BatchNorms are frozen for it, since they couple samples themselves."""
    bench = evidence.bench
    bench.begin()
    _freeze_norms(bench.model)
    if any(uses_batch_statistics(module) for _, module in batchnorms_of(bench.model)):
        return []
    bench.silences.append(_freeze_norms)
    try:
        return _weighing(evidence)
    finally:
        bench.silences.pop()


def _freeze_norms(model: nn.Module) -> None:
    for _, module in batchnorms_of(model):
        module.training = False


def _weighing(evidence: Evidence) -> list[Cause]:
    """Which weights of the micro-batches' gradients make the undivided batch's gradient?"""
    bench = evidence.bench
    micros = evidence.reading.split(evidence.batch, evidence.micro_batch)[:64]
    parts, units = [], []
    for micro in micros:
        gradient, counted = bench.gradient_of(micro)
        parts.append(gradient)
        units.append(counted[0])
    whole, whole_units = bench.gradient_of(evidence.batch)
    weights, left = _fit(parts, whole)
    # A fit of few vectors to many numbers leaves nothing only where it is the truth.
    if left > max(1e3 * bench.numbers.unit(bench.model), 10 * evidence.gradient.tolerance):
        return [
            Cause(
                "a loss that does not decompose",
                (),
                f"no weighting of the micro-batches' gradients gives the undivided batch's: "
                f"{said(left)} of it remains",
                "samples are coupled in the loss (in-batch negatives, a quantile, a ratio of two "
                "sums over the batch): wb.Coupled(encode, loss) computes it on the whole batch; or "
                "means over different things are added up: wb.Loss.terms keeps them apart",
            )
        ]
    total = sum(units)
    if abs(total - whole_units[0]) > 1e-6 * max(total, 1.0):
        evidence_said = (
            f"the micro-batches have {total:g} units together, the undivided batch "
            f"{whole_units[0]:g}"
        )
        return [_mean_of_means(evidence_said, weights)]
    if max(abs(weight - 1.0) for weight in weights) > 1e-3:
        return [
            _mean_of_means(
                "the undivided batch weighs its micro-batches' totals by "
                + ", ".join(f"{weight:.3g}" for weight in weights[:6])
                + (", ..." if len(weights) > 6 else "")
                + ", and sums would all weigh 1",
                weights,
            )
        ]
    return []


def _mean_of_means(evidence: str, weights: Sequence[float]) -> Cause:
    return Cause(
        "a mean of means",
        (),
        f"{evidence}: the loss is not a sum with the units that it is over",
        "return the sum and its units, wb.Loss(total, units), or a mean through "
        "wb.mean_loss(mean, units)",
    )


def _fit(parts: Sequence[Sequence[Tensor | None]], whole: Sequence[Tensor | None]) -> Any:
    """Least squares of `whole` over `parts`, by their Gram matrix: weights, and what is left."""
    count = len(parts)
    gram = torch.zeros(count + 1, count + 1, dtype=torch.float64)
    vectors = [*parts, whole]
    for tensors in zip(*vectors, strict=True):
        like = next((t for t in tensors if t is not None), None)
        if like is None:
            continue
        rows = torch.stack(
            [(torch.zeros_like(like) if t is None else t).double().flatten() for t in tensors]
        )
        gram += rows @ rows.T
    if not bool(torch.isfinite(gram).all()):
        return [1.0] * count, 0.0  # overflowed: nothing can be said about the weights
    inner, right, size = gram[:count, :count], gram[:count, count], gram[count, count]
    weights = torch.linalg.lstsq(inner, right, driver="gelsd").solution
    left = size - 2 * weights @ right + weights @ inner @ weights
    relative = float((left.clamp_min(0.0) / size).sqrt()) if size > 0 else 0.0
    return [float(weight) for weight in weights], relative


def _unexplained(evidence: Evidence) -> Cause:
    if evidence.float64 is not None and evidence.float64.same:
        return Cause(
            "rounding",
            (),
            f"in float64 the two are the same ({said(evidence.float64.distance)}), so the "
            "arithmetic is right and only its rounding is larger than the undivided batch's own",
            "other kernels are chosen for the smaller shape; a larger micro-batch, or more digits "
            "in the accumulation, brings it down",
        )
    return Cause(
        "unexplained",
        tuple(line.name for line in evidence.gradient.differing[:4]),
        "the model repeats itself, keeps no state, couples no samples, and its loss decomposes",
        "the window itself may be at fault: please report it with this output",
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
