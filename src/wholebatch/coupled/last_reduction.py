"""Read the last reduction of a loss from its graph: mean or sum, and its scale.

Between a loss and its reductions lie only operations on single numbers. The graph is followed that
far: `(F.cross_entropy(logits, labels) + 0.1 * penalty.mean()) / 4` has two terms, both means, both
divided by 4.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

# Operations that pass one number on, up to its sign. `where` is how mean_loss leaves out a mean
# over no units.
_PASS = (
    *("Add", "Sub", "Neg", "ToCopy", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze"),
    *("Alias", "Clone", "NanToNum", "Where"),
)
# Operations that keep numbers as they are, or add them; and some that make losses of them. A mean
# by weights has a product or a division between these and its sum.
_KEEP = (
    *(*_PASS, "Sum", "ClampMin", "Gather"),
    *("Index", "MaskedFill", "MaskedSelect", "Select", "Slice"),
)
_LOSSES = (
    *("Pow", "Abs", "Softplus", "LogSigmoid", "Logsumexp", "LogSoftmax", "Norm", "CtcLoss"),
    *("NllLoss", "BinaryCrossEntropyWithLogits", "MseLoss", "SmoothL1Loss", "HuberLoss"),
)
_MOST_NODES = 256
_CLOSE = 4e-3  # one step of bfloat16: a factor may have been rounded to it


@dataclass(frozen=True, slots=True)
class Scale:
    """A number by which a term is multiplied or divided."""

    operation: Literal["multiplied", "divided"]
    by: float


@dataclass(frozen=True, slots=True)
class Reduction:
    """A term of a loss: its last reduction, and the scales on top of it, the outermost first."""

    kind: Literal["mean", "sum", "hidden", "unknown"]
    """"hidden": a function without a graph made it: a custom or compiled one."""
    node: str
    """Name of the node of autograd."""
    sizes: tuple[int, ...]
    """Shape of what was reduced; () if the graph does not tell."""
    scales: tuple[Scale, ...]
    labels: float | None = None
    """The number of labels, or the sum of their weights, that a cross-entropy divided by."""
    is_plain: bool = False
    """True for a sum of losses that nothing has multiplied or divided."""

    @property
    def divisor(self) -> float | None:
        """The number that a sum was divided by to be a mean; None if the graph does not tell."""
        if self.kind == "mean":
            return self.count if self.labels is None else self.labels
        divisors = [scale.by for scale in self.scales if scale.operation == "divided"]
        return divisors[-1] if self.kind == "sum" and divisors else None

    @property
    def count(self) -> int:
        """The number of elements that were reduced."""
        return math.prod(self.sizes)

    @property
    def function(self) -> str:
        """The name of torch's function, as users write it: `mse_loss`."""
        words = re.sub(r"Backward\d*$", "", self.node)
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", words).lower()
        return "cross_entropy" if name.startswith("nll_loss") else name


def last_reductions(loss: Tensor) -> list[Reduction]:
    """Return the terms that a scalar loss is the sum of.

    >>> losses = torch.rand(6, requires_grad=True)
    >>> [(r.kind, r.sizes, [s.by for s in r.scales]) for r in last_reductions(losses.mean() / 4)]
    [('mean', (6,), [4.0])]
    """
    return list(_reductions(loss)) if loss.grad_fn is not None else []


@torch.no_grad()
def _reductions(loss: Tensor) -> Iterator[Reduction]:
    unit = torch.ones((), dtype=loss.dtype, device=loss.device)
    waiting: list[tuple[Any, tuple[Scale, ...]]] = [(loss.grad_fn, ())]
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        node, scales = waiting.pop()
        name = node.name()
        inner = [child for child, _ in node.next_functions if child is not None]
        operation = name.partition("Backward")[0]
        reduction = getattr(node, "_saved_reduction", 0)
        sizes = getattr(node, "_saved_self_sym_sizes", None)
        if isinstance(node, BackwardCFunction):  # whatever its class is called
            yield Reduction("hidden", name, (), scales)
            continue
        of_one_number = operation in ("Mean", "Sum") and math.prod(sizes or ()) == 1
        if (operation in _PASS or of_one_number) and inner:
            waiting += [(child, scales) for child in inner]
        elif operation in ("Mul", "Div") and len(inner) == 1 and not _is_by_sample(node):
            waiting.append((inner[0], (*scales, _scale(node, operation, unit))))
        elif operation in ("Mean", "Sum"):
            kind: Literal["mean", "sum"] = "mean" if operation == "Mean" else "sum"
            is_plain = kind == "sum" and not scales and _adds_losses(inner)
            yield Reduction(kind, name, tuple(sizes or ()), scales, is_plain=is_plain)
        elif reduction in (1, 2):  # torch's own loss functions
            logits = getattr(node, "_saved_self", None)
            shape = tuple(logits.shape) if isinstance(logits, Tensor) else ()
            if name.startswith("NllLoss"):  # one number is taken of the classes, dimension 1
                shape = shape[:1] + shape[2:]
            labels = getattr(node, "_saved_total_weight", None) if reduction == 1 else None
            yield Reduction(
                "mean" if reduction == 1 else "sum",
                name,
                shape,
                scales,
                None if labels is None else float(labels),
            )
        else:
            yield Reduction("unknown", name, (), scales)


def _adds_losses(nodes: Sequence[Any]) -> bool:
    """True if what these nodes made are losses, which nothing has multiplied or divided."""
    waiting, ends = [*nodes], 0
    for _ in range(_MOST_NODES):
        if not waiting:
            break
        node = waiting.pop()
        operation = re.sub(r"(2D|Nd)?Backward\d*$", "", node.name(), flags=re.IGNORECASE)
        if operation in _KEEP:
            waiting += [child for child, _ in node.next_functions if child is not None]
        elif operation in _LOSSES and getattr(node, "_saved_weight", None) is None:
            ends += 1
        else:
            return False
    return ends > 0 and not waiting


def without_units(terms: Sequence[Reduction], units: float) -> list[Reduction] | None:
    """Return the terms of a mean that was multiplied by its units (`wb.mean_loss`), or None."""
    outermost = [term.scales[0] for term in terms if len(term.scales) > 0]
    if not terms or len(outermost) < len(terms):
        return None
    if all(one.operation == "multiplied" and math.isclose(one.by, units) for one in outermost):
        return [replace(term, scales=term.scales[1:]) for term in terms]
    return None


def _is_by_sample(node: Any) -> bool:
    """True if the other factor, or the divisor, is a tensor of its own number for each sample."""
    try:
        other = getattr(node, "_saved_other", None)
    except RuntimeError:  # the graph has been used
        return False
    return isinstance(other, Tensor) and other.dim() > 0


def _scale(node: Any, operation: str, unit: Tensor) -> Scale:
    """Return the factor of a product, or the divisor: the node's own derivative tells it."""
    try:
        results = node(unit)
        slopes = results if isinstance(results, tuple) else (results,)
        slope = abs(float(next(s for s in slopes if s is not None)))
    except RuntimeError:  # the graph has been used, or the saved factor was changed in place
        slope = math.nan
    if operation == "Mul":
        return Scale("multiplied", slope)
    return Scale("divided", 1 / slope if slope else math.inf)
