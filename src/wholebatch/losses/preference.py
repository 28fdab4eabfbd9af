"""DPO, a loss over pairs, of one log probability per sequence (`sequence_logprobs`)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from wholebatch.errors import LossError
from wholebatch.losses.loss import Loss, wide


def sequence_logprobs(logits: Tensor, labels: Tensor, *, ignore_index: int = -100) -> Tensor:
    """Return the log probability of each sequence's labels, summed over its tokens.

    The logits of place t are those of label t + 1, as Hugging Face models give them.

    >>> import torch
    >>> sequence_logprobs(torch.zeros(1, 3, 4), torch.tensor([[-100, 1, 2]]))
    tensor([-2.7726])

    Args:
        logits: `[sequences, tokens, vocabulary]`.
        labels: `[sequences, tokens]`, not shifted.
        ignore_index: Labels with this value do not count.
    """
    logits, labels = wide(logits[:, :-1]), labels[:, 1:]
    per_token = -functional.cross_entropy(
        logits.transpose(1, 2), labels, ignore_index=ignore_index, reduction="none"
    )
    return per_token.sum(1)


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Loss:
    """Return -log sigmoid(β·Δ), summed over pairs; Δ = log-ratio of chosen minus that of rejected.

    Give sums of log probabilities. With `label_smoothing` ε (cDPO) it is
    -(1 - ε)·log sigmoid(β·Δ) - ε·log sigmoid(-β·Δ).

    Args:
        chosen: Log probabilities of the preferred answers, one per pair.
        rejected: Log probabilities of the other answers.
        reference_chosen: The reference model's, of the preferred answers.
        reference_rejected: The reference model's, of the other answers.
        beta: Strength of the preference.
        label_smoothing: The share of labels that are taken as wrong (cDPO).
    """
    _check_pairs(chosen, rejected, reference_chosen, reference_rejected)
    scaled = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    losses = -(1 - label_smoothing) * functional.logsigmoid(scaled)
    if label_smoothing:
        losses = losses - label_smoothing * functional.logsigmoid(-scaled)
    return Loss(losses.sum(), len(losses))


def _check_pairs(*each: Tensor) -> None:
    shapes = {tuple(values.shape) for values in each}
    if len(shapes) > 1 or each[0].dim() != 1:
        raise LossError(
            f"log probabilities of shapes {', '.join(map(str, sorted(shapes)))}: must "
            "be one number per pair, of the chosen and of the rejected answers"
        )
