"""Find the layers that couple samples: change one, and see whose output for the others moves."""

from __future__ import annotations

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
    "Compute it per sample, or move it into the loss of wb.Coupled(encode, loss), which sees the "
    "whole batch. Samples are the first dimension: transpose a batch of (time, samples, ...)"
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
    if count < 2:
        return []
    norms = [norm for norm in batchnorms(model) if uses_batch_statistics(norm[1])]
    before, after = (
        _trace(model, run, layout.take([first, *range(1, count)]), count, norms)
        for first in (0, count - 1)  # the last sample stands in place of the first, too
    )
    origins: list[str] = []
    for key in [key for key in before if key in after]:  # calls may depend on the sample itself
        name = key[0]
        below = f"{name}." if name and name != _FUNCTION else ""
        is_inside = any(inner == name or inner.startswith(below) for inner in origins)
        inputs, outputs = zip(before[key], after[key], strict=True)
        if not is_inside and _differ(*outputs) and not _differ(*inputs):
            origins.append(name)
    types = {name: type(module).__name__ for name, module in model.named_modules()}
    return [AuditFinding(name, types.get(name, "function"), "probe", _LAYER) for name in origins]


def _trace(
    model: nn.Module, run: Callable[[Any], Any], batch: Any, count: int, norms: Any
) -> _Traced:
    """Run the samples; return for every call of a module the digests of all but the first."""
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

    with ForwardState(model), fixed_statistics(norms), torch.enable_grad(), ExitStack() as hooks:
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
    leaves = (leaf.value for leaf in flatten(tree)[0])
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())
    return [
        _digest(tensor.detach()[1:])
        for tensor in tensors
        if tensor.shape[0] == count and tensor.layout is torch.strided
    ]


def _digest(rows: Tensor) -> Tensor:
    """Return the norm of each row, and a sum in which no two of its elements have the same weight.

    Two numbers for each sample take no memory; all activations would.
    """
    rows = torch.view_as_real(rows) if rows.is_complex() else rows
    rows = rows if rows.is_floating_point() else rows.float()
    flat = rows.flatten(1) if rows.dim() > 1 else rows[:, None]
    weights = (torch.arange(flat.shape[1], device=flat.device) * 1.7 + 0.3).cos().to(flat)
    norms = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)
    return torch.stack([norms, (flat @ weights).double()])


def _differ(ours: list[Tensor], others: list[Tensor]) -> bool:
    """True if digests differ by more than rounding, relative to the largest value."""
    if [tensor.shape for tensor in ours] != [tensor.shape for tensor in others]:
        return True
    pairs = zip(ours, others, strict=True)
    return any(bool((a - b).abs().max() > _MOVED * a.abs().max()) for a, b in pairs if a.numel())
