"""Losses of preference data: over pairs (DPO, IPO, ORPO, SimPO, reward models) or samples (KTO).

Log probabilities are one number per sequence, from `sequence_logprobs`: their sum over the tokens
of the answer, or their mean where the loss is normalised by length.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from wholebatch.errors import LossError
from wholebatch.losses.loss import Loss, OfTheBatch, Terms, wide


def sequence_logprobs(
    logits: Tensor, labels: Tensor, *, mean: bool = False, ignore_index: int = -100
) -> Tensor:
    """Return the log probability of each sequence's labels: the sum, or the mean over its tokens.

    The logits of place t are those of label t + 1, as Hugging Face models give them.

    >>> sequence_logprobs(torch.zeros(1, 3, 4), torch.tensor([[-100, 1, 2]]))
    tensor([-2.7726])

    Args:
        logits: `[sequences, tokens, vocabulary]`.
        labels: `[sequences, tokens]`, not shifted.
        mean: Return the mean over tokens instead of the sum.
        ignore_index: Labels with this value do not count.
    """
    logits, labels = wide(logits[:, :-1]), labels[:, 1:]
    counted = labels != ignore_index
    per_token = -functional.cross_entropy(
        logits.transpose(1, 2), labels, ignore_index=ignore_index, reduction="none"
    )
    return per_token.sum(1) / counted.sum(1).clamp(min=1) if mean else per_token.sum(1)


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


def ipo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
) -> Loss:
    """Return (Δ - 1/(2β))², summed over pairs.

    Pass means over tokens, as TRL and the authors' code do, or sums, as in the paper.

    Args:
        chosen: Log probabilities of the preferred answers, one per pair.
        rejected: Log probabilities of the other answers.
        reference_chosen: The reference model's, of the preferred answers.
        reference_rejected: The reference model's, of the other answers.
        beta: Strength of the preference.
    """
    _check_pairs(chosen, rejected, reference_chosen, reference_rejected)
    delta = (chosen - reference_chosen) - (rejected - reference_rejected)
    return Loss((delta - 1 / (2 * beta)).square().sum(), len(delta))


def simpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 2.0, margin: float = 1.0) -> Loss:
    """Return -log sigmoid(β·(chosen - rejected) - margin), summed over pairs. Give means.

    Args:
        chosen: Log probabilities of the preferred answers, one per pair.
        rejected: Log probabilities of the other answers.
        beta: Strength of the preference.
        margin: The wanted difference.
    """
    _check_pairs(chosen, rejected)
    losses = -functional.logsigmoid(beta * (chosen - rejected) - margin)
    return Loss(losses.sum(), len(losses))


def orpo_loss(
    chosen: Tensor, rejected: Tensor, *, beta: float = 0.1, tokens: Tensor | None = None
) -> Loss | Terms:
    """Return the negative log likelihood of the chosen answers plus β times the odds-ratio loss.

    Give means over tokens. The odds-ratio loss is -log sigmoid(log odds(chosen) - log
    odds(rejected)), with odds(p) = p / (1 - p), over pairs. The likelihood is a mean over pairs of
    means over tokens, as in the paper. With `tokens`, the number of tokens of each chosen answer,
    it is a mean over all tokens, as in TRL. The two terms, "nll" and "odds", then have different
    units.

    Args:
        chosen: Log probabilities of the preferred answers, one per pair.
        rejected: Log probabilities of the other answers.
        beta: Weight of the odds-ratio loss.
        tokens: Tokens of each chosen answer, for a mean over all tokens.
    """
    _check_pairs(chosen, rejected)
    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    odds = -functional.logsigmoid(log_odds)
    if tokens is None:
        return Loss((beta * odds - chosen).sum(), len(chosen))
    return Loss.terms(
        {"nll": (-(chosen * tokens).sum(), tokens.sum()), "odds": (odds.sum(), len(odds), beta)}
    )


def reward_loss(
    chosen: Tensor, rejected: Tensor, *, margin: Tensor | float = 0.0, center: float = 0.0
) -> Loss:
    """Return -log sigmoid(chosen - rejected - margin), summed over pairs of rewards.

    `center` weighs the square of a pair's summed rewards, which keeps rewards near zero.

    Args:
        chosen: Rewards of the preferred answers, one per pair.
        rejected: Rewards of the other answers.
        margin: The wanted difference.
        center: Weight of the squared sum of a pair's rewards.
    """
    _check_pairs(chosen, rejected)
    losses = -functional.logsigmoid(chosen - rejected - margin)
    if center:
        losses = losses + center * (chosen + rejected).square()
    return Loss(losses.sum(), len(losses))


def kto_loss(
    policy: Tensor,
    reference: Tensor,
    desirable: Tensor,
    kl: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Loss:
    """Return KTO's loss, summed over samples: 1 - sigmoid(±β·(log-ratio - z)).

    z is the mean over the *whole* batch of the log-ratios of mismatched answers, at least 0,
    without a gradient. Give them as `kl`, one per sample: the loss is then one of the whole batch,
    for `wb.Coupled` (it is refused for a micro-batch alone). Or give their mean over the window,
    from a pass of your own, as a 0-dim tensor.

    Args:
        policy: Log probabilities of the answers, one per sample.
        reference: The reference model's.
        desirable: True for good answers.
        kl: Log-ratios of mismatched answers, one per sample; or their mean, a 0-dim tensor.
        beta: Strength of the preference.
        desirable_weight: Weight of good answers.
        undesirable_weight: Weight of bad answers.
    """
    if not policy.shape == reference.shape == desirable.shape or policy.dim() != 1:
        raise LossError(
            f"policy, reference and desirable of shapes {tuple(policy.shape)}, "
            f"{tuple(reference.shape)} and {tuple(desirable.shape)}: must be one number per sample"
        )
    ratio = policy - reference
    z = kl.detach().mean().clamp(min=0)
    good = desirable.bool()
    gain = torch.where(good, ratio - z, z - ratio)
    weight = torch.full_like(ratio, undesirable_weight).masked_fill(good, desirable_weight)
    total = (weight * (1 - functional.sigmoid(beta * gain))).sum()
    kind = Loss if kl.dim() == 0 else OfTheBatch
    return kind(total, len(ratio))


def _log1mexp(logprob: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0, without cancellation near 0."""
    near = logprob > -0.693
    small = torch.log(-torch.expm1(logprob.where(near, torch.full_like(logprob, -0.5))))
    large = torch.log1p(-torch.exp(logprob.where(~near, torch.full_like(logprob, -1.0))))
    return torch.where(near, small, large)


def _check_pairs(*each: Tensor) -> None:
    shapes = {tuple(values.shape) for values in each}
    if len(shapes) > 1 or each[0].dim() != 1:
        raise LossError(
            f"log probabilities or rewards of shapes {', '.join(map(str, sorted(shapes)))}: must "
            "be one number per pair, of the chosen and of the rejected answers"
        )
