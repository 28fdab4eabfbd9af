"""A model whose samples act on each other, or whose forward changes state."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.audit.adds_up import check_adds_up
from wholebatch.audit.check import Check, LossOfMicroBatch, silenced
from wholebatch.audit.finding import OF_STATE, UNTESTED
from wholebatch.batch.samples import Layout, Leaf, flatten, tensors_of
from wholebatch.window.replaced_attributes import emptied

_log = logging.getLogger("wholebatch")


class FirstCall(Check):
    """Warn of a model whose outputs are not those of two parts of its rows, or that moves state.

    Asked of the first call, in four forwards without gradients and without the user's hooks; only
    where the units are as many as the rows, which may be no samples all the same.
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
            what = _difference(module, given, max(rows))
        except Exception as error:  # it cannot be called so
            _log.debug("a call of %s was not tested: %r", type(module).__name__, error)
            return
        if what is not None:
            begin = f"{type(module).__name__}: {what}"
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
    by_row = [isinstance(each.value, Tensor) and each.value.dim() > 0 for each in leaves]
    marked = [Leaf(each.name, each.value, rows) for each, rows in zip(leaves, by_row, strict=True)]
    layout = Layout(rows, tuple(marked), structure)

    def run(few: Any) -> Any:
        return module(*few["args"], **few["kwargs"])

    hooks = [held for m in module.modules() for held in (m._forward_hooks, m._forward_pre_hooks)]
    with emptied(hooks):
        result = check_adds_up(module, run, layout, count=rows, gradients=False, outputs=True)
    for finding in result.findings:
        if finding.kind in OF_STATE:
            return f"a forward moves {finding.name}, which {finding.advice}"
        if finding.kind not in UNTESTED:
            return f"its output for one of {rows} rows depends on the others"
    return None
