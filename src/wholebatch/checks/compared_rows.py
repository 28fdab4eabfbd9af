"""A loss that compares rows of the model's outputs with each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from wholebatch.checks.check import Answer, Check, MicroBatch
from wholebatch.coupled.causes import AuditFinding
from wholebatch.coupled.sample_runs import emptied
from wholebatch.window.autograd_graph import graph_nodes

_MOST_ROWS = 1 << 13
_MOST_ELEMENTS = 1 << 24
_LINKED = 1e-6
_MOST_ASKED = 8
_LOSS = "the loss"


class ComparedRows(Check):
    """A loss that compares samples.

    Finds: a loss whose gradient by one row of a model's output depends on another row, while the
    units claim more independent parts than there are.

    Costs: the second derivative of the loss by the outputs, twice per micro-batch; up to 8 times
    where rows belong together (bags, ranking lists).

    Certain: the second derivative is computed, not guessed. Rows that a BatchNorm links are left
    out.

    Cannot see: detached statistics of the micro-batch (normalised advantages, the hardest
    samples); operations without a second derivative; outputs without a row for each sample.
    """

    def micro_batch(self, micro: MicroBatch) -> Answer:
        return linked_rows(micro.loss, micro.number, micro.outputs)


def linked_rows(loss: Tensor, units: float, outputs: Iterable[Tensor]) -> AuditFinding | None:
    """Find samples that the loss compares: the gradient of one row depends on another row.

    `outputs` are those of the models in this micro-batch, with a row for each sample.

    Row i is linked with row j if the second derivative of the loss by both is not zero. Linked rows
    are one part of the loss, and no other row can be more than a part of its own. So there are at
    most (parts found) + (rows in none of them) parts, and no more units.
    """
    outputs = [one for one in outputs if _can_be_differentiated(one, units)]
    outputs = [one for one in outputs if not _is_below_a_batchnorm(one, outputs)]
    if units <= 1 or not outputs:
        return None
    between = graph_nodes([loss], {one.grad_fn for one in outputs})
    if any(isinstance(node, BackwardCFunction) for node in between):
        return None  # A custom autograd function may change what it has saved.
    hooks = [one._backward_hooks for one in outputs]  # Fabric refuses a backward that is not its
    try:
        with emptied(hooks), torch.enable_grad(), torch.autocast(loss.device.type, enabled=False):
            made = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
            used = [(o, g) for o, g in zip(outputs, made, strict=True) if g is not None]
            for size in {len(output) for output, _ in used}:
                found = _compared(size, used, units)
                if found is not None:
                    return found
    except (RuntimeError, NotImplementedError):  # an operation without a second derivative
        return None
    return None


def _compared(
    size: int, outputs: Sequence[tuple[Tensor, Tensor]], units: float
) -> AuditFinding | None:
    """Find links from rows of the outputs with `size` rows that leave fewer parts than units."""
    parts: dict[int, list[Tensor]] = {}  # by the number of rows of the outputs that they are in
    row = 0
    for number in range(_MOST_ASKED):
        linked = _linked_with(row, size, outputs)
        for rows, which in linked.items():
            apart = [one for one in parts.get(rows, []) if not bool((one & which).any())]
            joined = [one for one in parts.get(rows, []) if bool((one & which).any())]
            parts[rows] = [*apart, torch.stack([which, *joined]).any(0)] if which.any() else apart
            in_parts = sum(int(one.sum()) for one in parts[rows])
            if len(parts[rows]) + rows - in_parts < min(units, rows):
                return _comparison(int(which.sum()), rows, units)
        free = torch.ones(size, dtype=torch.bool)
        for one in parts.get(size, []):
            free &= ~one.cpu()
        free[row] = False
        left = free.nonzero().flatten().tolist()
        is_linked = any(int(which.sum()) > 1 for which in linked.values())
        if not left or (number and not is_linked):
            return None
        row = size // 2 if number == 0 and size // 2 in left else left[0]
    return None


def _is_below_a_batchnorm(output: Tensor, others: Iterable[Tensor]) -> bool:
    """True if another output is computed from this one, through a BatchNorm that was allowed.

    That BatchNorm links the rows, not the loss.
    """
    for other in others:
        above = list(graph_nodes([other], {output.grad_fn} - {other.grad_fn}))
        leads = any(node is output.grad_fn for n in above for node, _ in n.next_functions)
        if leads and any("BatchNorm" in node.name() for node in above):
            return True
    return False


def _can_be_differentiated(output: Tensor, units: float) -> bool:
    """True for an output of a graph with a row for each sample."""
    return (
        output.grad_fn is not None
        and output.is_floating_point()
        and output.layout is torch.strided
        and 1 < len(output) <= _MOST_ROWS
        and output.numel() <= _MOST_ELEMENTS
        and not output.retains_grad
        # [time, samples], or the last states of a recurrent layer, [layers, samples, ...]
        and not (output.dim() > 1 and output.shape[1] == units != len(output))
        and not (output.dim() > 2 and output.shape[1] == units)
    )


def _linked_with(
    row: int, size: int, outputs: Sequence[tuple[Tensor, Tensor]]
) -> dict[int, Tensor]:
    """Return which rows move the gradient of this row of the outputs with `size` rows.

    They are told by the number of rows of the output that they are in.
    """
    own = [gradient[row] for output, gradient in outputs if len(output) == size]
    asked = torch.stack([_mixed(gradient) for gradient in own]).sum()
    if not asked.requires_grad:  # a loss that is linear in the outputs
        return {}
    tensors = [output for output, _ in outputs]
    moved = torch.autograd.grad(asked, tensors, retain_graph=True, allow_unused=True)
    rows = [one.nan_to_num().abs().reshape(len(one), -1) for one in moved if one is not None]
    found = [one.amax(1) for one in rows]
    largest = max((float(one.max()) for one in found), default=0.0)
    linked: dict[int, Tensor] = {}
    for one in found:
        above = one > _LINKED * largest
        linked[len(one)] = linked.get(len(one), torch.zeros_like(above)) | above
    return linked


def _mixed(row: Tensor) -> Tensor:
    """Return one number of a row's gradient, in which no two elements have the same weight."""
    places = torch.arange(row.numel(), device=row.device)
    wide = row.dtype if row.dtype is torch.float64 else torch.float32
    return (row.flatten().to(wide) * (places * 1.7 + 0.3).cos().to(wide)).sum()


def _comparison(linked: int, rows: int, units: float) -> AuditFinding:
    text = (
        f"this loss compares samples with each other: it links {linked} of the model's {rows} "
        f"output rows, and units={units:g} claims as many independent parts. Use WholeBatch with "
        "loss=wb.Coupled(encode, loss), which sees the whole batch; if several rows make one unit "
        "(pairs, lists), pass the number of pairs or lists as units="
    )
    return AuditFinding(_LOSS, "comparison", "compared", text)
