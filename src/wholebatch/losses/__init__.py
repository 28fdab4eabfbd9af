"""Losses by name: `wb.losses.dpo_loss(...)`. Each returns a `wb.Loss`: a sum and its units."""

from __future__ import annotations

from wholebatch.losses.contrastive import clip_loss, info_nce
from wholebatch.losses.policy import (
    aggregate,
    aggregate_units,
    group_sizes,
    policy_loss,
    token_kl,
)
from wholebatch.losses.preference import dpo_loss, sequence_logprobs

__all__ = [
    "aggregate",
    "aggregate_units",
    "clip_loss",
    "dpo_loss",
    "group_sizes",
    "info_nce",
    "policy_loss",
    "sequence_logprobs",
    "token_kl",
]


def __dir__() -> list[str]:
    return [*__all__]
