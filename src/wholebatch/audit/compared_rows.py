"""A loss that compares rows of the model's outputs with each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from wholebatch.audit.check import Answer, Check, MicroBatch, Warned, silenced
from wholebatch.audit.finding import AuditFinding
from wholebatch.window.autograd_graph import graph_nodes
from wholebatch.window.replaced_attributes import emptied

_MOST_ROWS = 1 << 13
_MOST_ELEMENTS = 1 << 24
_LINKED = 1e-6
_MOST_GROUPS = 3
_MOST_LINKS = 6
_LOSS = "the loss"


class ComparedRows(Check):
    """A loss that compares samples.

    Finds: a loss whose gradient by one row of a model's output depends on other rows, while the
    units claim more independent groups of rows than there are.

    Costs: the second derivative of the loss by the outputs, a few times per micro-batch.

    Certain if all rows of an output are one group: the second derivative is computed, not guessed.
    Likely if there are several groups (lists, bags), which the micro-batches may hold whole. Rows
    that a BatchNorm links are left out, and calls of the model for as many groups as there are
    units.

    Cannot see: detached statistics of the micro-batch (normalised advantages, the hardest
    samples); operations without a second derivative; outputs without a row for each sample.
    """

    def micro_batch(self, micro: MicroBatch) -> Answer:
        return linked_rows(micro.loss, micro.number, micro.outputs)


def linked_rows(loss: Tensor, units: float, outputs: Iterable[Tensor]) -> Answer:
    """Find samples that the loss compares: the gradient of one row depends on another row.

    `outputs` are those of the models in this micro-batch, with a row for each sample.

    Row i is linked with row j if the second derivative of the loss by both is not zero. Rows that
    are linked are one group: the loss has as many independent parts as there are groups.
    """
    outputs = [output for output in outputs if _can_be_differentiated(output, units)]
    outputs = [output for output in outputs if not _is_below_a_batchnorm(output, outputs)]
    if units <= 1 or not outputs:
        return None
    between = graph_nodes([loss], {output.grad_fn for output in outputs})
    if any(isinstance(node, BackwardCFunction) for node in between):
        return None  # A custom autograd function may change what it has saved.
    hooks = [
        output._backward_hooks for output in outputs
    ]  # Fabric refuses a backward that is not its
    try:
        with emptied(hooks), torch.enable_grad(), torch.autocast(loss.device.type, enabled=False):
            gradients = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
            used = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
            for size in {len(output) for output, _ in used} - {1}:
                answer = _comparison(size, units, used)
                if answer is not None:
                    return answer
    except (RuntimeError, NotImplementedError):  # an operation without a second derivative
        return None
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
        and 0 < len(output) <= _MOST_ROWS
        and output.numel() <= _MOST_ELEMENTS
        and not output.retains_grad
        # [time, samples], or the last states of a recurrent layer, [layers, samples, ...]
        and not (output.dim() > 1 and output.shape[1] == units != len(output))
        and not (output.dim() > 2 and output.shape[1] == units)
    )


def _comparison(size: int, units: float, outputs: Sequence[tuple[Tensor, Tensor]]) -> Answer:
    """Answer to the outputs with `size` rows, if they have fewer groups than units.

    A group is all rows that are linked, also through others. Of a few rows the groups are found; a
    row outside of them may be a group of its own, so that there are at most
    `groups + rows outside` of them.
    """
    own = [gradient for output, gradient in outputs if len(output) == size]
    outside = torch.ones(size, dtype=torch.bool, device=own[0].device)
    for groups in range(1, _MOST_GROUPS + 1):
        rest = outside.nonzero()[:, 0]
        if not len(rest):
            break
        row = int(rest[(groups - 1) * len(rest) // _MOST_GROUPS])
        reached = _group_of(row, size, outputs, [len(output) for output, _ in outputs])
        if reached is None:  # the loss is linear in the outputs
            return None
        group = reached.pop(size)
        if any(rows.any() and not rows.all() for rows in reached.values()):
            return None  # a call for a bag of another output's rows, which tell the groups
        outside &= ~group.to(outside.device)
        most = groups + int(outside.sum())
        if most < min(units, size):
            linked = int(group.sum())
            calls = _separate_calls(outputs) if linked == size else 0
            if calls >= units:
                return None
            certain = linked == size and calls <= 1 and _one_is_linked_alone(size, outputs)
            return _refused(size, units) if certain else _warned(linked, size, units)
    return None


def _one_is_linked_alone(size: int, outputs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """True if all rows of an output are linked, where row i of another may be another sample.

    An expert's rows are those that the router has sent to it.
    """
    for place, (output, _) in enumerate(outputs):
        if len(output) == size:
            group = _group_of(0, place, outputs, range(len(outputs)))
            if group is not None and bool(group[place].all()):
                return True
    return False


def _separate_calls(outputs: Sequence[tuple[Tensor, Tensor]]) -> int:
    """Return how many outputs are linked inside, or have one row, and not with each other.

    They are groups of their own: the lists of a ranking, the tasks of a meta-learner, with a call
    of the model for each.
    """
    tensors = [output for output, _ in outputs]
    separate: list[set[int]] = []
    for place, (output, gradient) in enumerate(outputs):
        first = _mixed(gradient[:1])
        if not first.requires_grad:
            continue
        moved = torch.autograd.grad(first, tensors, retain_graph=True, allow_unused=True)
        linked = {n: rows for n, rows in enumerate(moved) if rows is not None and rows.any()}
        if len(output) == 1 or any(rows[1:].any() for rows in linked.values()):
            reached = {place, *linked}
            joined = [group for group in separate if group & reached]
            separate = [group for group in separate if group not in joined]
            separate.append(reached.union(*joined))
    return len(separate)


def _group_of(
    row: int, start: int, outputs: Sequence[tuple[Tensor, Tensor]], keys: Sequence[int]
) -> dict[int, Tensor] | None:
    """Return the rows that are linked with this row of the output `start`, also through others.

    `keys` names each output. Outputs of one name have the same samples in their rows.
    """
    reached = {
        key: torch.zeros(len(output), dtype=torch.bool)
        for key, (output, _) in zip(keys, outputs, strict=True)
    }
    reached[start][row] = True
    for _ in range(_MOST_LINKS):
        linked = _linked_with(reached, outputs, keys)
        if linked is None:
            return None
        before, reached = reached, {key: linked[key] | rows for key, rows in reached.items()}
        if all(bool((before[key] == rows).all()) for key, rows in reached.items()):
            break
    return reached


def _linked_with(
    rows: Mapping[int, Tensor], outputs: Sequence[tuple[Tensor, Tensor]], keys: Sequence[int]
) -> dict[int, Tensor] | None:
    """Return which rows move the gradients of these rows, by the name of the output."""
    named = list(zip(keys, outputs, strict=True))
    asked = torch.stack(
        [_mixed(gradient[rows[key].to(gradient.device)]) for key, (_, gradient) in named]
    ).sum()
    if not asked.requires_grad:
        return None
    tensors = [output for output, _ in outputs]
    moved = torch.autograd.grad(asked, tensors, retain_graph=True, allow_unused=True)
    distances = [
        (key, distance.nan_to_num().abs().reshape(len(distance), -1).amax(1).cpu())
        for key, distance in zip(keys, moved, strict=True)
        if distance is not None
    ]
    largest = max((float(distance.max()) for _, distance in distances), default=0.0)
    linked = {key: torch.zeros(len(among), dtype=torch.bool) for key, among in rows.items()}
    for key, distance in distances:
        linked[key] |= distance > _LINKED * largest
    return linked


def _mixed(rows: Tensor) -> Tensor:
    """Return one number of some rows' gradient, in which no two elements have the same weight."""
    places = torch.arange(rows.numel(), device=rows.device)
    wide = rows.dtype if rows.dtype is torch.float64 else torch.float32
    return (rows.flatten().to(wide) * (places * 1.7 + 0.3).cos().to(wide)).sum()


def _refused(rows: int, units: float) -> AuditFinding:
    text = (
        f"this loss compares samples with each other: it links all of the model's {rows} output "
        f"rows, and units={units:g} claims as many independent parts. Use WholeBatch with "
        "loss=wb.Coupled(encode, loss), which sees the whole batch; if several rows make one unit "
        "(pairs, lists), pass the number of pairs or lists as units="
    )
    return AuditFinding(_LOSS, "comparison", "compared", text)


def _warned(linked: int, rows: int, units: float) -> Warned:
    begin = f"this loss links {linked} of the model's {rows} output rows"
    return Warned(
        f"{begin}, and units={units:g} claims more independent parts than there are. If samples "
        "are compared with others that a micro-batch may cut off, use WholeBatch with "
        "loss=wb.Coupled(encode, loss), which sees the whole batch. If each micro-batch holds its "
        f"groups whole (pairs, lists, graphs), nothing is wrong; {silenced(begin)}"
    )
