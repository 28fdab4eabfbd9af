"""The autograd graph of a loss: its nodes, and the graphs that a window cannot use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from wholebatch.errors import LossError, UnsupportedError

_SECOND_BACKWARD = (
    "an earlier backward has freed a part of this loss's graph. If the loop calls "
    "loss.backward(), remove it: the window runs the backward pass. Otherwise two losses share a "
    "graph: add them and call backward once, or detach() or recompute what they share (a hidden "
    "state, an encoder's output)"
)

transforms_active: Any = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


def graph_nodes(totals: Iterable[Any], until: Iterable[Any] = ()) -> Iterator[Any]:
    """Yield every node of the graph at and below these totals or nodes, and above `until`."""
    stack: list[Any] = [getattr(total, "grad_fn", total) for total in totals]
    visited: set[Any] = set(until)
    while stack:
        node = stack.pop()
        if node is not None and node not in visited:
            yield node
            visited.add(node)
            stack.extend(successor for successor, _ in node.next_functions)


def refuse_freed_graph(error: BaseException) -> None:
    """Raise a LossError if `error` is torch's of a graph that an earlier backward has freed."""
    if "through the graph a second time" in str(error):
        raise LossError(_SECOND_BACKWARD) from error


def refuse_reentrant(totals: Iterable[Tensor]) -> None:
    """Refuse a graph with reentrant activation checkpointing.

    It cannot add into chosen parameters alone (a GAN's generator loss flows through the judge,
    whose parameters must not be added to).
    """
    if any(type(node).__name__ == "CheckpointFunctionBackward" for node in graph_nodes(totals)):
        raise UnsupportedError(
            "torch.utils.checkpoint with use_reentrant=True: its backward adds to the gradients "
            "of all parameters, not only to those of the window; pass use_reentrant=False "
            '(Transformers: gradient_checkpointing_kwargs={"use_reentrant": False})'
        )


def version_of(tensor: Tensor) -> int:
    """Return the number of writes into a tensor; those of inference mode are not counted."""
    return 0 if tensor.is_inference() else tensor._version


def in_backward() -> bool:
    """True if a backward runs on this thread: a forward inside it is a recomputation."""
    return torch._C._current_graph_task_id() != -1
