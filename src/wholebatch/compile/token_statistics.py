"""What the metrics of TRL's trainers need of each row of logits, in one pass over them.

As operations of torch, the entropy, the most likely class and the mean would read the logits ten
times, and write them four times in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wholebatch.compile.cross_entropy import can_fuse_entropy
from wholebatch.compile.fusion import ANY_STRIDES, operation

_AT_ONCE = 1 << 22
"""The most numbers that are computed with at once on a CPU."""


def _run(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if logits.dtype is not torch.float64 and can_fuse_entropy(logits.device):
        from wholebatch.compile.triton_kernels import token_statistics

        return token_statistics(logits)
    entropies, classes, means = _fake(logits)
    rows = max(1, _AT_ONCE // logits.shape[1])
    for first in range(0, len(logits), rows):
        here = slice(first, first + rows)
        some = logits[here].to(entropies.dtype)
        logs = some.log_softmax(-1)
        entropies[here] = -(logs.exp() * logs).sum(-1)
        classes[here], means[here] = some.argmax(-1), some.mean(-1)
    return entropies, classes, means


def _fake(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    rows = logits.shape[0]
    entropies, means = (logits.new_empty(rows, dtype=dtype) for _ in range(2))
    return entropies, logits.new_empty(rows, dtype=torch.int64), means


_OPERATION: Any = operation("token_statistics", _run, _fake, **ANY_STRIDES)


@torch.no_grad()
def token_statistics(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the entropy of each row's distribution, its most likely class, and its mean logit.

    Call it before a cross-entropy of these logits: in a graph that overwrites them.
    """
    entropies, classes, means = _OPERATION(logits.detach())
    return entropies, classes, means
