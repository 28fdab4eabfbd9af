"""Find the layers that couple samples: change one, and see whose output for the others moves."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.audit.finding import AuditFinding
from wholebatch.batch.samples import Layout, flatten
from wholebatch.coupled.normalisation_layers import (
    batchnorms,
    fixed_statistics,
    uses_batch_statistics,
)
from wholebatch.errors import LossError
from wholebatch.window.autograd_graph import transforms_active
from wholebatch.window.forward_state import ForwardState

_LAYER = (
    "its output for one sample changed when another sample changed, so it needs the whole batch. "
    "Samples are the first dimension: if this batch is (time, samples, ...), transpose it. If it "
    "calls F.batch_norm, use an nn.BatchNorm instead, which is exact. Otherwise compute it "
    "per sample, or move it into the loss of wb.Coupled(encode, loss), which sees the whole batch"
)
_FUNCTION = "(the function itself)"  # in place of a module's name
_MOST = 8
_MOVED = 1e-5

_Traced = dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]]
"""Digests of inputs and outputs, by the name of a module and the index of its call."""


def layers_that_couple(
    model: nn.Module, run: Callable[[Any], Any], layout: Layout
) -> list[AuditFinding]:
    """Return the modules whose output for one sample moves when another sample changes.

    A module is named if what it was given for the unchanged samples stayed the same and what it
    gave back for them did not: the origin, not all that lies behind it. Of nested modules, the
    innermost; the function itself, if it is in no module.
    """
    count = min(layout.size, _MOST)
    origins = _origins(model, run, layout, count) if count > 1 else []
    if origins and count > 2:
        # A dimension that happens to be as long as the samples are many is told by another
        # number of them.
        fewer = _origins(model, run, layout, count - 1)
        origins = [name for name in origins if name in fewer]
    types = {name: type(module).__name__ for name, module in model.named_modules()}
    return [AuditFinding(name, types.get(name, "function"), "probe", _LAYER) for name in origins]


def _origins(model: nn.Module, run: Callable[[Any], Any], layout: Layout, count: int) -> list[str]:
    def traced(*, change: bool = False) -> _Traced:
        with ForwardState(model), fixed_statistics(norms), torch.enable_grad():
            return _trace(model, run, layout, count, change=change)

    norms = [norm for norm in batchnorms(model) if uses_batch_statistics(norm[1])]
    before, again, after = traced(), traced(), traced(change=True)
    origins: list[str] = []
    for key, (inputs, outputs) in before.items():
        if key not in after or key not in again:
            continue  # the path through the model depends on the sample itself
        noise = _distance(outputs, again[key][1])
        moved = _distance(outputs, after[key][1]) > _MOVED + 10 * noise
        name = key[0]
        below = f"{name}." if name and name != _FUNCTION else ""
        is_inside = any(inner == name or inner.startswith(below) for inner in origins)
        if moved and _distance(inputs, after[key][0]) <= _MOVED and not is_inside:
            origins.append(name)
    return origins


def _trace(
    model: nn.Module, run: Callable[[Any], Any], layout: Layout, count: int, *, change: bool
) -> _Traced:
    """Run the first samples; return for every call of a module the digests of all samples but one.

    With `change`, the last sample stands in place of the first too.
    """
    batch = layout.take([count - 1 if change else 0, *range(1, count)])
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
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(leave(name), with_kwargs=True))
        torch.manual_seed(0)
        with suppress(LossError):  # a loss function's result cannot lead back from here
            traced[_FUNCTION, 0] = ([], _other_rows(run(batch), count))
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
