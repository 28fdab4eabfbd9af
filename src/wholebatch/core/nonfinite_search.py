"""Which micro-batch is to blame: each one again, alone, with the randomness that it had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from wholebatch.core import random_state
from wholebatch.core.forward_state import ForwardState
from wholebatch.core.loss import Loss, Terms

__all__ = ["find_nonfinite"]


def find_nonfinite(
    model: nn.Module,
    micros: Sequence[Any],
    forward: Callable[[Any], Loss | Terms],
    start: dict[str, Any],
) -> tuple[int | None, str]:
    """The first micro-batch whose gradient is not finite, and a sentence that says so.

    `start` is the random state before the first of them; buffers and random state are left as
    they are found.
    """
    now = ForwardState(model)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parameters = [parameter for _, parameter in named]
    random_state.restore(start)
    try:
        for index, micro in enumerate(micros):
            loss = forward(micro)
            terms = [loss] if isinstance(loss, Loss) else list(loss.by_name.values())
            gradients = torch.autograd.grad(
                [term.total for term in terms], parameters, allow_unused=True
            )
            for (name, _), gradient in zip(named, gradients, strict=True):
                if gradient is not None and not bool(torch.isfinite(gradient).all()):
                    return index, (
                        f"Replayed, micro-batch {index + 1} of {len(micros)} is the first "
                        f"whose gradient is not finite, at parameter {name}"
                    )
    finally:
        now.restore()
    return None, (
        "Replayed, no micro-batch has such a gradient alone: their sum overflows, or a gradient "
        "hook or on_gradient= has made it so"
    )
