"""A model whose samples act on each other, or whose forward changes state."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.audit.check import Check, LossOfMicroBatch, silenced
from wholebatch.audit.held_draws import HeldDraws
from wholebatch.batch.samples import flatten, tensors_of
from wholebatch.coupled.normalisation_layers import BatchNorm
from wholebatch.window.forward_state import ForwardState
from wholebatch.window.replaced_attributes import emptied, replaced_attributes

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
_log = logging.getLogger("wholebatch")


class FirstCall(Check):
    """A model whose samples act on each other, or whose forward changes state.

    Finds: a first call of a model whose outputs are not those of two parts of its rows, or not
    those of the same call again; buffers that two parts move otherwise than the whole.

    Costs: four forwards of one micro-batch, without gradients and without your hooks.

    Warns: only where the units are as many as the rows, which may be no samples all the same (the
    nodes of one graph).

    Cannot see: what shows only in later windows; a call whose tensors differ in their rows, or that
    meets other ranks; layers of BatchNorm, which `batchnorm=` is for.
    """

    def __init__(self) -> None:
        self._tested: WeakSet[nn.Module] = WeakSet()
        self._warnings: list[tuple[int, str]] = []  # with the rows of the call

    def call(self, module: nn.Module, given: Any) -> None:
        """Test the first call of a model, before the call itself."""
        module = module.module if isinstance(module, DistributedDataParallel) else module
        rows = {len(tensor) for tensor in tensors_of(given) if tensor.dim()}
        if module in self._tested or not module.training or len(rows) != 1 or min(rows) < 2:
            return
        self._tested.update(module.modules())
        if any(isinstance(m, nn.SyncBatchNorm | DistributedDataParallel) for m in module.modules()):
            return
        try:
            found = _difference(module, given, max(rows))
        except Exception as error:  # it cannot be called with fewer rows
            _log.debug("a call of %s was not tested: %r", type(module).__name__, error)
            return
        if found is not None:
            begin = f"{type(module).__name__}: {found}"
            warning = (
                f"{begin}. If its rows are samples, micro-batches do not make the update of the "
                "whole batch: run wb.verify. If they belong together (the nodes of one graph, the "
                f"tokens of one text), nothing is wrong; {silenced(begin)}"
            )
            self._warnings.append((max(rows), warning))

    def loss_is_known(self, micro: LossOfMicroBatch) -> Iterable[str]:
        return [warning for rows, warning in self._warnings if rows == micro.number]


@torch.no_grad()
def _difference(module: nn.Module, given: Any, rows: int) -> str | None:
    """Return what a call of some rows does otherwise than the calls of two parts of them."""
    leaves, structure = flatten({"args": list(given[0]), "kwargs": dict(given[1])})
    values = [leaf.value for leaf in leaves]

    def run(part: slice) -> list[Tensor]:
        few = structure.build([_few(value, part) for value in values])
        outputs = tensors_of(module(*few["args"], **few["kwargs"]))
        size = len(range(rows)[part])
        return [out for out in outputs if out.dim() and len(out) == size]

    hooks = [held for m in module.modules() for held in (m._forward_hooks, m._forward_pre_hooks)]
    draws, cut = HeldDraws(), (rows + 1) // 2
    norms = [m for m in module.modules() if isinstance(m, BatchNorm) and m.training]
    with ExitStack() as stack:
        stack.enter_context(emptied(hooks))
        for norm in norms:  # `batchnorm=` is for them
            stack.enter_context(replaced_attributes(norm, training=False))
        before = ForwardState(module)
        stack.callback(before.restore)
        with draws.recording():
            whole = run(slice(None))
        moved = _buffers(module)
        with draws.serving():
            again = run(slice(None))
        before.restore()
        with draws.serving():
            first = run(slice(cut))
        with draws.serving():
            second = run(slice(cut, None))
        moved_by_parts = _buffers(module)
    if not draws.held:
        return None
    if not all(map(_are_equal, whole, again)):
        return "its output depends on state that the call before it has changed"
    parts = [torch.cat(pair) for pair in zip(first, second, strict=True)]
    if not all(map(_are_equal, whole, parts)):
        return f"its output for one of {rows} rows depends on the others"
    for (name, one), other in zip(moved.items(), moved_by_parts.values(), strict=True):
        if not _are_equal(one, other):
            return f"a forward moves its buffer {name}, by two parts otherwise than by the whole"
    return None


def _few(value: Any, part: slice) -> Any:
    """Return some rows of a tensor, which the module may write into."""
    return value[part].clone() if isinstance(value, Tensor) and value.dim() else value


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers that hold numbers, without those of BatchNorms."""
    return {
        f"{name}.{buffer}".strip("."): value.clone()
        for name, owner in module.named_modules()
        if not isinstance(owner, BatchNorm)
        for buffer, value in owner._buffers.items()
        if value is not None and value.is_floating_point()
    }


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """True if two tensors are equal up to rounding."""
    if one.shape != other.shape or not one.numel() or not one.is_floating_point():
        return one.shape == other.shape
    one, other = one.detach(), other.detach()
    tolerance = _ROUNDING.get(one.dtype, 3e-2) * one.abs().max().clamp(min=1e-30)
    return not bool(((one - other).abs() > tolerance).any())
