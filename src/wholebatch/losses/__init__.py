"""Losses by name, each with the units that it is a mean over: policies, preferences, distillation.

docs/which-mean.md has the formulas.
"""

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
    "distillation_loss",
    "dpo_loss",
    "group_sizes",
    "ipo_loss",
    "kto_loss",
    "orpo_loss",
    "policy_loss",
    "reward_loss",
    "sequence_logprobs",
    "simpo_loss",
    "token_kl",
    "value_loss",
]
