"""Find the layers that let one sample's output depend on the other samples of its batch.

Such a layer makes plain accumulation silently wrong: BatchNorm by a third to two thirds of the
gradient. Layers are judged by their type. With a batch, one sample is changed: if the output of a
layer for the other samples moves, it couples them. That finds what no list of types can know.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.batch.samples import flatten
from wholebatch.coupled.causes import AuditFinding
from wholebatch.coupled.normalisation_layers import (
    BatchNorm,
    batchnorms,
    is_spectral_norm,
    tracked_instance_norms,
    uses_batch_statistics,
)
from wholebatch.coupled.sample_runs import ChosenSamples
from wholebatch.errors import LossError, UnsupportedError
from wholebatch.window.autograd_graph import transforms_active

_log = logging.getLogger("wholebatch")

_POLICIES = (
    'WholeBatch(batchnorm="exact") is exact; Accumulator needs "freeze" or "allow", or GroupNorm'
)
_ADVICE = {
    "batchnorm": f"normalises with the statistics of the batch: {_POLICIES}",
    "custom": (f"a BatchNorm with a custom forward: {_POLICIES}"),
    "sync": (
        "normalises with the statistics of the micro-batch on all ranks, not of the window: "
        'WholeBatch(batchnorm="exact") includes the ranks'
    ),
    "running": (
        "outputs do not depend on other samples, but the running statistics move once for every "
        'micro-batch: WholeBatch(batchnorm="exact") moves them once per window'
    ),
    "frequency": (
        "scale_grad_by_freq=True divides the gradient of a row by how often it occurs in the "
        "micro-batch, not in the batch: leave it out"
    ),
    "spectral": (
        "runs one power iteration in every forward in training: its state changes once per "
        "micro-batch, not once per update; in evaluation mode it does not change"
    ),
}
_LAYER = (
    "its output for one sample changed when another sample changed, so it needs the whole batch. "
    "Samples are the first dimension: if this batch is (time, samples, ...), transpose it. If it "
    "calls F.batch_norm, use an nn.BatchNorm instead, which is exact. Otherwise compute it "
    "per sample, or move it into the loss of wb.Coupled(encode, loss), which sees the whole batch"
)
_FUNCTION = "(the function itself)"  # in place of a module's name
_MOVED = 1e-5


# --------------------------------------------------------------------- by type


def layers_by_type(model: nn.Module) -> list[AuditFinding]:
    """Return the layers that couple samples or move with each micro-batch, in their mode."""
    layers = [(name, m, _kind(m)) for name, m in batchnorms(model) if uses_batch_statistics(m)]
    layers += [(name, m, "running") for name, m in tracked_instance_norms(model) if m.training]
    for name, module in model.named_modules():
        scales = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq
        if scales and module.weight.requires_grad:
            layers.append((name, module, "frequency"))
        if module.training and is_spectral_norm(module):
            layers.append((name, module, "spectral"))
    return [
        AuditFinding(name, type(module).__name__, kind, _ADVICE[kind])
        for name, module, kind in layers
    ]


def refused_by_type(model: nn.Module) -> list[AuditFinding]:
    """Return the layers that no policy makes right in micro-batches."""
    return [finding for finding in layers_by_type(model) if finding.kind == "frequency"]


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.SyncBatchNorm):
        return "sync"
    return "batchnorm" if type(module).forward is BatchNorm.forward else "custom"


def warn_of_spectral_norms(model: nn.Module) -> None:
    """Warn of spectral normalisations, which move once per micro-batch."""
    for finding in layers_by_type(model):
        if finding.kind == "spectral":
            _log.warning("%s", finding)


def refuse_lazy_parameters(model: nn.Module) -> None:
    """Refuse a model with parameters that have no weights yet."""
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise UnsupportedError(
                f"{name!r} is lazy and has no weights yet: run one batch through the model first"
            )


# --------------------------------------------------------------------- by changing one sample

_Traced = dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]]
"""Digests of inputs and outputs, by the name of a module and the index of its call."""


def layers_that_couple(samples: ChosenSamples, count: int) -> list[AuditFinding]:
    """Return the modules whose output for one sample moves when another sample changes.

    A module is named if what it was given for the unchanged samples stayed the same and what it
    gave back for them did not: the origin, not all that lies behind it. Of nested modules, the
    innermost; the function itself, if it is in no module. The first `count` samples run three
    times, without a backward.
    """
    count = min(count, len(samples.rows))
    origins = _origins(samples, count) if count > 1 else []
    if origins and count > 2:
        # A dimension that happens to be as long as the samples are many is told by another
        # number of them.
        fewer = _origins(samples, count - 1)
        origins = [name for name in origins if name in fewer]
    types = {name: type(module).__name__ for name, module in samples.model.named_modules()}
    return [AuditFinding(name, types.get(name, samples.name), "probe", _LAYER) for name in origins]


def _origins(samples: ChosenSamples, count: int) -> list[str]:
    def traced(*, graph: bool, change: bool = False) -> _Traced:
        samples.restore()
        with torch.set_grad_enabled(graph):
            return _trace(samples, count, change=change)

    graph = False
    try:
        before = traced(graph=graph)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # a function that takes gradients itself (a gradient penalty)
        graph = True
        before = traced(graph=graph)
    again, after = traced(graph=graph), traced(graph=graph, change=True)
    origins: list[str] = []
    for key, (inputs, outputs) in before.items():
        if key not in after or key not in again:
            continue  # the path through the model depends on the sample itself
        noise = _distance(outputs, again[key][1])
        inputs_gap, outputs_gap = (
            _distance(inputs, after[key][0]),
            _distance(outputs, after[key][1]),
        )
        moved = inputs_gap <= _MOVED and outputs_gap > _MOVED + 10 * noise
        name = key[0]
        below = f"{name}." if name and name != _FUNCTION else ""
        if moved and not any(inner == name or inner.startswith(below) for inner in origins):
            origins.append(name)
    return origins


def _trace(samples: ChosenSamples, count: int, *, change: bool) -> _Traced:
    """Run the first samples; return for every call of a module the digests of all samples but one.

    With `change`, the last sample stands in place of the first too.
    """
    rows = samples.rows[:count]
    batch = samples.layout.take([rows[-1] if change else rows[0], *rows[1:]])
    traced: _Traced = {}
    calls: dict[str, int] = {}
    entered: list[list[Tensor]] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        entered.append(_other_rows((args, kwargs), count))

    def leave(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            index = calls[name] = calls.get(name, -1) + 1
            traced[name, index] = (entered.pop(), _other_rows(output, count))

        return hook

    with ExitStack() as hooks:
        for name, module in samples.model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(leave(name), with_kwargs=True))
        torch.manual_seed(0)
        with suppress(LossError):  # a loss function's result cannot lead back from here
            traced[_FUNCTION, 0] = ([], _other_rows(samples.run(batch), count))
    return traced


def _other_rows(tree: Any, count: int) -> list[Tensor]:
    """Return the digests of all tensors with a row for each sample, without the first row."""
    if transforms_active():  # under torch.vmap, a tensor cannot leave the call
        return []
    leaves = [leaf.value for leaf in flatten(tree)[0]]
    return [
        _digest(leaf.detach()[1:])
        for leaf in leaves
        if isinstance(leaf, Tensor)
        and leaf.dim()
        and leaf.shape[0] == count
        and leaf.layout is torch.strided
    ]


def _digest(rows: Tensor) -> Tensor:
    """Return the norm of each row, and a sum in which no two of its elements have the same weight.

    Two numbers for each sample take no memory; all activations would.
    """
    if rows.is_complex():
        rows = torch.view_as_real(rows)
    if not rows.is_floating_point():
        rows = rows.float()
    flat = rows.flatten(1) if rows.dim() > 1 else rows[:, None]
    weights = (torch.arange(flat.shape[1], device=flat.device) * 1.7 + 0.3).cos().to(flat)
    norms = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)
    return torch.stack([norms, (flat @ weights).double()])


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    """Return the largest difference relative to the largest value; inf where shapes differ."""
    if [x.shape for x in a] != [x.shape for x in b]:
        return math.inf
    worst = 0.0
    for left, right in zip(a, b, strict=True):
        gap = (left - right).abs().max()
        worst = max(worst, float(gap / left.abs().max().clamp_min(1e-30)))
    return worst
