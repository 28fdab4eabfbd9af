"""Backward that adds into chosen parameters only.

A GAN's generator loss flows through the judge, whose parameters must not be added to. Autograd's
`inputs=` does exactly that, except with reentrant activation checkpointing, which refuses it;
there a plain backward runs, and the other parameters of the models are given back what they held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Backward", "backward_into", "is_reentrant"]


_engine = getattr(torch.autograd.Variable, "_execution_engine", None)
_run_backward: Any = getattr(_engine, "run_backward", None)
"""What `torch.autograd.backward` calls when it has looked at its arguments. Ours are always of one
kind, and the look takes a tenth of a short backward."""
_transforms: Any = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


@dataclass(frozen=True)
class Backward:
    """A backward that adds into chosen parameters only."""

    run: Callable[[Sequence[Tensor], Sequence[Tensor]], None]
    overlaps: bool = True
    """True if each gradient is complete when it is added (not so with reentrant checkpoints)."""


def backward_into(
    parameters: Sequence[Tensor], models: Iterable[nn.Module], totals: Iterable[Tensor]
) -> Backward:
    """Return a backward for graphs like those of `totals` that adds into `parameters` alone."""
    if not is_reentrant(totals):
        leaves = tuple(parameters)

        def isolated(totals: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
            plain = _run_backward is not None and not _transforms()
            if plain and all(type(total) is Tensor for total in totals):
                _run_backward(tuple(totals), tuple(seeds), False, False, leaves, True, True)
            else:
                torch.autograd.backward(totals, seeds, inputs=parameters)

        return Backward(isolated)

    own = {id(parameter) for parameter in parameters}
    others = [p for model in models for p in model.parameters() if id(p) not in own]

    def restoring(totals: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
        held = [parameter.grad for parameter in others]
        for parameter in others:
            parameter.grad = None
        try:
            torch.autograd.backward(totals, seeds)
        finally:
            for parameter, gradient in zip(others, held, strict=True):
                parameter.grad = gradient

    return Backward(restoring, overlaps=False)


def is_reentrant(totals: Iterable[Tensor]) -> bool:
    """Return True if the graph has a node of torch.utils.checkpoint(use_reentrant=True)."""
    stack: list[Any] = [total.grad_fn for total in totals]
    seen: set[Any] = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if type(node).__name__ == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        stack.extend(successor for successor, _ in node.next_functions)
    return False
