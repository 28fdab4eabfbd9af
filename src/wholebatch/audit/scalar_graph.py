"""Read from the graph of a loss what it adds up: means and sums, and the numbers around them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_MOST_NODES = 256
_ONE_NUMBER = ("Neg", "ToCopy", "View", "Squeeze", "Unsqueeze", "Alias", "Clone", "Where")
_AVERAGE = 1  # torch's code of reduction="mean"; 2 is "sum"


@dataclass(frozen=True)
class Part:
    """One part of a loss: the last operation that made one number of several."""

    kind: Literal["mean", "sum"]
    function: str
    """torch's loss function, whose own `reduction` this is; "" for `.mean()` and `.sum()`."""
    sizes: tuple[int, ...]
    """The shape of what was reduced."""
    over: float
    """What a mean is over: its elements, its labels, or the weights of these."""
    factors: tuple[float, ...]
    """The numbers that it is multiplied by, the outermost first."""

    @property
    def divisor(self) -> float | None:
        """What a mean is over, also one that is a sum and its division; None if that is not seen.

        The innermost division of a sum is its own.
        """
        if self.kind == "mean":
            return self.over
        return next((1 / factor for factor in reversed(self.factors) if 0 < factor < 1), None)

    def is_divided_by(self, number: float) -> bool:
        """True if one of its factors is 1 / number, up to a step of bfloat16."""
        return any(math.isclose(factor * number, 1.0, rel_tol=4e-3) for factor in self.factors)


def parts_of(loss: Tensor) -> list[Part]:
    """Return the parts that a scalar loss is the sum of, as far as the graph shows them.

    >>> import torch
    >>> losses = torch.rand(6, requires_grad=True)
    >>> [(part.kind, part.over, part.factors) for part in parts_of(losses.mean() / 4)]
    [('mean', 6.0, (0.25,))]
    """
    found = (_part(node, factors) for node, factors in _ends(loss.grad_fn))
    return [part for part in found if part is not None]


def without_units(parts: list[Part], units: float) -> list[Part] | None:
    """Return the parts of a mean that was multiplied by its units, without them; or None."""
    if not parts or not all(
        part.factors and math.isclose(part.factors[0], units) for part in parts
    ):
        return None
    return [
        Part(part.kind, part.function, part.sizes, part.over, part.factors[1:]) for part in parts
    ]


def _ends(root: Any) -> Iterator[tuple[Any, tuple[float, ...]]]:
    """Yield the nodes below sums, products with numbers and changes of shape, with the factors."""
    waiting: list[tuple[Any, tuple[float, ...]]] = [(root, ())]
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        node, factors = waiting.pop()
        if node is None:
            continue
        operation = node.name().partition("Backward")[0]
        below = [child for child, _ in node.next_functions]
        if operation in ("Add", "Sub"):
            alpha = float(getattr(node, "_saved_alpha", 1))
            more = [(), () if alpha == 1 else (alpha,)]
            waiting += [(child, (*factors, *f)) for child, f in zip(below, more, strict=False)]
        elif operation in _ONE_NUMBER or (
            operation in ("Mean", "Sum") and not saved_by(node, "self_sym_sizes")
        ):
            waiting += [(child, factors) for child in below]
        elif operation in ("Mul", "Div") and (scaled := _scaled(node, operation, below)):
            waiting.append((scaled[0], (*factors, scaled[1])))
        else:
            yield node, factors


def _scaled(node: Any, operation: str, below: list[Any]) -> tuple[Any, float] | None:
    """Return the operand of a product with a number, and that number; None for other products."""
    operands = [child for child in below if child is not None]
    if len(operands) != 1:
        return None
    is_first = below[0] is not None
    by = number_of(saved_by(node, "other" if is_first else "self"))
    if by is None or (operation == "Div" and (by == 0 or not is_first)):
        return None
    return operands[0], abs(by) if operation == "Mul" else abs(1 / by)


def _part(node: Any, factors: tuple[float, ...]) -> Part | None:
    name = node.name().partition("Backward")[0]
    if name in ("Mean", "Sum"):
        sizes = tuple(map(int, saved_by(node, "self_sym_sizes") or ()))
        kind: Literal["mean", "sum"] = "mean" if name == "Mean" else "sum"
        return Part(kind, "", sizes, float(math.prod(sizes)), factors)
    reduction, inputs = saved_by(node, "reduction"), saved_by(node, "self")
    if reduction not in (1, 2) or not isinstance(inputs, Tensor):
        return None
    sizes = tuple(inputs.shape)
    if name.startswith("NllLoss"):  # one number is taken of the classes, dimension 1
        sizes = sizes[:1] + sizes[2:]
    labels = number_of(saved_by(node, "total_weight")) if name.startswith("NllLoss") else None
    over = float(math.prod(sizes)) if labels is None or reduction != _AVERAGE else labels
    return Part("mean" if reduction == _AVERAGE else "sum", _function(name), sizes, over, factors)


def _function(name: str) -> str:
    """Return the name of torch's function as users write it: `mse_loss`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return "cross_entropy" if words.startswith("nll_loss") else words


def saved_by(node: Any, name: str) -> Any:
    """Return what a node keeps for its backward; None if it cannot be read."""
    try:
        return getattr(node, f"_saved_{name}", None)
    except RuntimeError:  # the graph was used already, or the tensor has changed since
        return None


def number_of(value: Any) -> float | None:
    """Return a scalar's value; None where there is none to read."""
    if isinstance(value, int | float):
        return float(value)
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
        return None
    try:
        with _disable_current_modes():  # They are given a number of the graph as a Python number.
            return float(value.detach())
    except (RuntimeError, TypeError, NotImplementedError):  # a tensor without numbers
        return None
