"""Losses by name: `wb.losses.dpo_loss(...)`. Each returns a `wb.Loss`: a sum and its units."""

from __future__ import annotations

from wholebatch.losses.contrastive import clip_loss, info_nce, siglip_loss, supcon_loss
from wholebatch.losses.distillation import distillation_loss
from wholebatch.losses.policy import (
    aggregate,
    aggregate_units,
    group_sizes,
    policy_loss,
    token_kl,
    value_loss,
)
from wholebatch.losses.preference import (
    dpo_loss,
    ipo_loss,
    kto_loss,
    orpo_loss,
    reward_loss,
    sequence_logprobs,
    simpo_loss,
)

__all__ = [
    "aggregate",
    "aggregate_units",
    "clip_loss",
    "distillation_loss",
    "dpo_loss",
    "group_sizes",
    "info_nce",
    "ipo_loss",
    "kto_loss",
    "orpo_loss",
    "policy_loss",
    "reward_loss",
    "sequence_logprobs",
    "siglip_loss",
    "simpo_loss",
    "supcon_loss",
    "token_kl",
    "value_loss",
]


def __dir__() -> list[str]:
    return [*__all__]
