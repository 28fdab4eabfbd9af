"""Distillation: the divergence of a student's distributions from its teacher's, over tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from wholebatch.errors import LossError, OptionError
from wholebatch.losses.loss import Loss, wide
from wholebatch.losses.policy import Mean, aggregate


def distillation_loss(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    mean: Mean = "tokens",
) -> Loss:
    """Return the generalised Jensen-Shannon divergence (GKD), summed over the tokens of the mask.

    `student` and `teacher` are logits [sequences, tokens, vocabulary]. With the mixture
    M = β·teacher + (1 - β)·student it is β·KL(teacher ‖ M) + (1 - β)·KL(student ‖ M); β = 0 is
    KL(teacher ‖ student), the usual distillation, and β = 1 is KL(student ‖ teacher). Logits are
    divided by `temperature` first (multiply the loss by its square to keep gradients of one size).

    >>> logits = torch.randn(2, 3, 5, requires_grad=True)
    >>> loss = distillation_loss(logits, torch.randn(2, 3, 5), torch.ones(2, 3))
    >>> int(loss.units)
    6

    Args:
        student: Logits of the student, `[sequences, tokens, vocabulary]`.
        teacher: Logits of the teacher.
        mask: 1 for tokens that count, `[sequences, tokens]`.
        beta: The mixture: 0 is KL(teacher ‖ student), 1 is KL(student ‖ teacher).
        temperature: The logits are divided by it.
        mean: The named mean, such as "tokens" or "sequences".
    """
    if student.shape != teacher.shape or student.shape[:-1] != mask.shape:
        raise LossError(
            f"logits of shapes {tuple(student.shape)} and {tuple(teacher.shape)} with a mask of "
            f"shape {tuple(mask.shape)}: must be [sequences, tokens, vocabulary] twice, and "
            "[sequences, tokens]"
        )
    if not 0 <= beta <= 1:
        raise OptionError(f"beta={beta!r}: must be from 0 (forward KL) to 1 (reverse KL)")
    if temperature <= 0:
        raise OptionError(f"temperature={temperature!r}: must be positive")
    ours = functional.log_softmax(wide(student / temperature), dim=-1)
    theirs = functional.log_softmax(wide(teacher.detach() / temperature), dim=-1)
    if beta == 0:
        return aggregate(_kl(theirs, ours), mask, mean=mean)
    if beta == 1:
        return aggregate(_kl(ours, theirs), mask, mean=mean)
    mixture = torch.logaddexp(ours + math.log1p(-beta), theirs + math.log(beta))
    both = beta * _kl(theirs, mixture) + (1 - beta) * _kl(ours, mixture)
    return aggregate(both, mask, mean=mean)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p ‖ q) per token, of log probabilities."""
    return (p.exp() * (p - q)).sum(-1)
