"""Policy losses per token (PPO, GRPO), and the named means over them.

`aggregate` turns losses per token into a `Loss`: the sum and the units that make the named mean of
the whole window, over all ranks. With l the loss of token t of sequence i, T_i the tokens of that
sequence that count, N the sequences and G the groups (the completions of one prompt):

| `mean=` | the mean of the window | total | units |
|---|---|---|---|
| "tokens" | Σ l / Σ T_i | Σ l | Σ T_i |
| "sequences" | 1/N Σ_i (1/T_i) Σ_t l | Σ_i (1/T_i) Σ_t l | N |
| "sequence_sums" | 1/N Σ_i Σ_t l | Σ l | N |
| "constant" | 1/(N·C) Σ l | Σ l / C | N |
| "groups" | 1/G Σ_g (Σ of g's l / g's tokens) | Σ_i (Σ_t l) / s_i | Σ_i T_i / s_i |
| "group_sequences" | 1/G Σ_g (mean in g of means of l) | Σ_i (1/T_i Σ_t l) / s_i | Σ_i 1 / s_i |

s_i is the size of i's group in the whole batch (`group_sizes`). The token mean of each micro-batch,
averaged over micro-batches, is not among them: it weighs a token by the length of whatever shares
its micro-batch, so that the loss changes with the split.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from wholebatch.errors import LossError, OptionError
from wholebatch.losses.loss import Loss, Units, wide

Mean: TypeAlias = Literal[
    "tokens", "sequences", "sequence_sums", "constant", "groups", "group_sequences"
]
Estimator: TypeAlias = Literal["k1", "k2", "k3"]

_MEANS = get_args(Mean)
_GROUPED = ("groups", "group_sequences")


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    *,
    mean: Mean = "tokens",
    constant: float | None = None,
    group_size: Tensor | None = None,
) -> Loss:
    """Return the named mean over the tokens that count, as a sum and its units.

    `per_token` and `mask` are [sequences, tokens]; what is masked may hold anything, also NaN.
    A sequence without a token counts as one whose mean is 0, except in "groups". `constant` is the
    number that mean="constant" divides a sequence's sum by, usually the longest completion allowed.
    `group_size` is that of `group_sizes`, one number per sequence.

    >>> per_token = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]], requires_grad=True)
    >>> mask = torch.tensor([[True, True, True], [True, False, False]])
    >>> for mean in ("tokens", "sequences", "sequence_sums"):
    ...     loss = aggregate(per_token, mask, mean=mean)
    ...     print(mean, loss.total.item(), int(loss.units))
    tokens 10.0 4
    sequences 6.0 2
    sequence_sums 10.0 2

    Args:
        per_token: Losses, `[sequences, tokens]`.
        mask: 1 for tokens that count, `[sequences, tokens]`.
        mean: The named mean, such as "tokens" or "sequences".
        constant: The number that mean="constant" divides by.
        group_size: The size of each sequence's group, from `group_sizes`.
    """
    mask = _checked_mask(per_token, mask)
    units = aggregate_units(mask, mean=mean, group_size=group_size)
    if (mean == "constant") != (constant is not None) or (constant is not None and constant <= 0):
        raise OptionError(
            f'mean={mean!r} with constant={constant!r}: mean="constant" needs a positive number to '
            "divide each sequence's sum by (the longest completion allowed); no other mean takes "
            "it"
        )
    sums = wide(per_token.masked_fill(~mask, 0.0)).sum(1)
    if mean in ("sequences", "group_sequences"):
        sums = sums / mask.sum(1).clamp(min=1)
    if group_size is not None:
        sums = sums / group_size.to(sums.dtype).clamp(min=1)
    return Loss(sums.sum() if constant is None else sums.sum() / constant, units)


def aggregate_units(
    mask: Tensor, *, mean: Mean = "tokens", group_size: Tensor | None = None
) -> Units:
    """Return the units of `aggregate` from the mask alone, for `units=` or `announce`.

    >>> aggregate_units(torch.tensor([[1, 1, 0], [1, 0, 0]]), mean="tokens").item()
    3

    Args:
        mask: 1 for tokens that count, `[sequences, tokens]`.
        mean: The named mean, such as "tokens" or "sequences".
        group_size: The size of each sequence's group, from `group_sizes`.
    """
    if mean not in _MEANS:
        raise OptionError(
            f"mean={mean!r}: must be one of {', '.join(_MEANS)} (docs/which-mean.md has the names "
            "of TRL and verl). The token mean of each micro-batch, TRL's bnpo, is none of them: it "
            "changes with the split"
        )
    if (mean in _GROUPED) != (group_size is not None):
        raise OptionError(
            f"mean={mean!r} with group_size={'None' if group_size is None else 'a tensor'}: "
            'mean="groups" and "group_sequences" need wb.losses.group_sizes(...) of the whole '
            "batch, and no other mean takes it"
        )
    if mean == "tokens":
        return mask.bool().sum()
    if group_size is None:
        return len(mask)
    if group_size.shape != mask.shape[:1]:
        raise LossError(
            f"group_size of shape {tuple(group_size.shape)} for {len(mask)} sequences: must be one "
            "number per sequence"
        )
    share = mask.bool().sum(1) if mean == "groups" else torch.ones_like(group_size)
    return (share.double() / group_size.double().clamp(min=1)).sum()


def group_sizes(groups: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the size of each sequence's group: its sequences, or with a mask its tokens.

    `groups` has one label per sequence: the prompt that it answers. Call it on the whole batch,
    before it is split over micro-batches and ranks, and keep the result as a column of the batch:
    a sequence needs the size of its whole group, wherever the others are.

    >>> group_sizes(torch.tensor([7, 7, 3]))
    tensor([2, 2, 1])

    Args:
        groups: One label per sequence: the prompt that it answers.
        mask: Count tokens of this mask instead of sequences.
    """
    _, group_of = groups.unique(return_inverse=True)
    counts = torch.ones_like(group_of) if mask is None else mask.bool().sum(1)
    sizes = torch.zeros(len(groups), dtype=counts.dtype, device=counts.device)
    return sizes.index_add_(0, group_of, counts)[group_of]


def policy_loss(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    mean: Mean = "tokens",
    old: Tensor | None = None,
    clip: float | tuple[float, float] | None = 0.2,
    max_ratio: float | None = None,
    ratio: Literal["token", "sequence"] = "token",
    plus: Tensor | None = None,
    constant: float | None = None,
    group_size: Tensor | None = None,
) -> Loss:
    """Return the clipped policy loss of PPO and GRPO, as a sum and its units.

    With r = exp(logprobs - old) it is -min(r·A, clamp(r, 1 - low, 1 + high)·A) per token. `clip` is
    one number, or (low, high), or None for no clipping. Without `old` the policy is the one that
    sampled: r is 1, with a gradient. `max_ratio` bounds r also where A is negative (dual clip).
    ratio="sequence" takes the geometric mean of a sequence's ratios for each of its tokens (GSPO).
    `advantages` are [sequences] or [sequences, tokens]. `plus` is added to the loss of each token,
    for terms over the same mean: `plus=0.04 * wb.losses.token_kl(logprobs, reference)`. Terms over
    another mean go through `wb.Loss.terms`.

    >>> logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    >>> loss = policy_loss(logprobs, torch.tensor([0.5]), torch.ones(1, 2))
    >>> loss.total.item(), int(loss.units)
    (-1.0, 2)

    Args:
        logprobs: Log probabilities of the sampled tokens, `[sequences, tokens]`.
        advantages: `[sequences]` or `[sequences, tokens]`.
        mask: 1 for tokens that count, `[sequences, tokens]`.
        mean: The named mean, such as "tokens" or "sequences".
        old: Log probabilities of the policy that sampled. Default: this one.
        clip: The range of the ratio: one number, (low, high), or None.
        max_ratio: The largest ratio where the advantage is negative (dual clip).
        ratio: "sequence" uses one ratio per sequence (GSPO).
        plus: Added to the loss of each token, such as a KL term.
        constant: The number that mean="constant" divides by.
        group_size: The size of each sequence's group, from `group_sizes`.
    """
    mask = _checked_mask(logprobs, mask)
    low, high = _clip_range(clip)
    old = logprobs.detach() if old is None else old
    log_ratio = wide((logprobs - old).masked_fill(~mask, 0.0))
    if ratio == "sequence":
        tokens = mask.sum(1, keepdim=True).clamp(min=1)
        log_ratio = (log_ratio.sum(1, keepdim=True) / tokens).expand_as(log_ratio)
    elif ratio != "token":
        raise OptionError(f'ratio={ratio!r}: must be "token" or "sequence"')
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    r = log_ratio.exp()
    clipped = r.clamp(min=1 - low, max=1 + high) * advantages
    if max_ratio is not None:
        r = r.clamp(max=max_ratio)
    per_token = -torch.minimum(r * advantages, clipped) if clip is not None else -r * advantages
    if plus is not None:
        per_token = per_token + plus
    return aggregate(per_token, mask, mean=mean, constant=constant, group_size=group_size)


def token_kl(logprobs: Tensor, reference: Tensor, estimator: Estimator = "k3") -> Tensor:
    """Return an estimate of KL(policy ‖ reference) per token, from tokens that the policy sampled.

    With d = reference - logprobs: "k1" is -d (unbiased, may be negative), "k2" is d²/2, "k3" is
    exp(d) - 1 - d (unbiased and never negative; GRPO's).

    Args:
        logprobs: Log probabilities of the sampled tokens.
        reference: Those of the reference model.
        estimator: "k1", "k2" or "k3".
    """
    difference = wide(reference - logprobs)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return difference.exp() - 1 - difference
    raise OptionError(f'estimator={estimator!r}: must be "k1", "k2" or "k3"')


def _clip_range(clip: float | tuple[float, float] | None) -> tuple[float, float]:
    low, high = clip if isinstance(clip, tuple) else (clip or 0.0, clip or 0.0)
    if low < 0 or high < 0:
        raise OptionError(f"clip={clip!r}: must be a positive number, (low, high), or None")
    return low, high


def _checked_mask(per_token: Tensor, mask: Tensor) -> Tensor:
    if per_token.dim() != 2 or mask.shape != per_token.shape:
        raise LossError(
            f"losses of shape {tuple(per_token.shape)} with a mask of shape {tuple(mask.shape)}: "
            "both must be [sequences, tokens]"
        )
    return mask.bool()
