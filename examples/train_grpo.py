"""GRPO: a small policy learns to answer with even digits in rising order.

    python examples/train_grpo.py --mean tokens    # DAPO; sequences: GRPO; constant: Dr. GRPO

One denominator for each term, whatever a micro-batch holds: `wb.losses.policy_loss` returns a sum
over tokens or sequences and the units that it is a mean over, and the KL term has units of its own.
The advantages are taken over each prompt's group before the batch is split. Micro-batches are cut
by tokens, and an update is one recorded graph for each shape where there is a GPU.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb

DIGITS, END, PROMPT, LONGEST = 10, 10, 2, 9
Batch = dict[str, Tensor]


class Policy(nn.Module):
    """One block of attention, which writes digits until it writes END."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(DIGITS + 1, 32), nn.Embedding(PROMPT + LONGEST, 32)
        self.attend, self.up, self.head = nn.Linear(32, 96), nn.Linear(32, 64), nn.Linear(64, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the log probabilities of the token that follows each."""
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        query, key, value = self.attend(x).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(F.relu(self.up(x))).log_softmax(-1)

    def of_tokens(self, tokens: Tensor) -> Tensor:
        """Return the log probability of each token after those before; of the first one, 0."""
        following = self(tokens[:, :-1]).gather(2, tokens[:, 1:, None])
        return F.pad(following[:, :, 0], (1, 0))


def reward(completion: list[int]) -> float:
    """Return the share of neighbours that are even and rise, times the length."""
    digits = completion[: completion.index(END)] if END in completion else []
    pairs = itertools.pairwise(digits)
    return sum(1.0 if b > a and a % 2 == b % 2 == 0 else -0.2 for a, b in pairs)


@torch.no_grad()
def rollout(policy: Policy, reference: Policy, prompts: int, group: int, draw: Any) -> Batch:
    """Sample a group of completions for each prompt, and reward them."""
    tokens = torch.randint(DIGITS, (prompts, PROMPT), generator=draw).repeat_interleave(group, 0)
    for _ in range(LONGEST):
        following = torch.multinomial(policy(tokens)[:, -1].exp(), 1, generator=draw)
        tokens = torch.cat([tokens, following], 1)
    completions = tokens[:, PROMPT:]
    mask = (completions == END).long().cumsum(1) - (completions == END).long() == 0  # END counts
    rewards = torch.tensor([reward(row) for row in completions.tolist()]).view(-1, group)
    # Over the group, and before the batch is split: a micro-batch may hold a part of a group.
    spread = rewards.std(1, keepdim=True) + 1e-4
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).flatten()
    return {
        "tokens": tokens,
        "mask": F.pad(mask, (PROMPT, 0)),
        "advantages": advantages.to(policy.head.weight.dtype),
        "old": policy.of_tokens(tokens),
        "reference": reference.of_tokens(tokens),
        "reward": rewards.flatten(),
    }


def make_loss(mean: str) -> Any:
    """Return the clipped policy loss with this mean, and a KL term over sequences."""
    constant = float(LONGEST) if mean == "constant" else None

    def loss(policy: Policy, micro: Batch) -> wb.Loss:
        logprobs, mask = policy.of_tokens(micro["tokens"]), micro["mask"]
        kl = wb.losses.token_kl(logprobs, micro["reference"])
        return wb.Loss.terms(
            {
                "policy": wb.losses.policy_loss(
                    logprobs,
                    micro["advantages"],
                    mask,
                    old=micro["old"],
                    mean=mean,
                    constant=constant,
                ),
                "kl": (wb.losses.aggregate(kl, mask, mean="sequences"), 0.02),
            }
        )

    return loss


def make_units(mean: str) -> Any:
    """Return the function that counts the units of both terms, before the first backward."""

    def units(micro: Batch) -> dict[str, Any]:
        policy = wb.losses.aggregate_units(micro["mask"], mean=mean)
        return {"policy": policy, "kl": len(micro["mask"])}

    return units


def make_update(policy: Policy, mean: str, micro_batch: Any, execute: str = "auto") -> Any:
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    return wb.WholeBatch(
        policy,
        optimizer,
        loss=make_loss(mean),
        units=make_units(mean),
        micro_batch=micro_batch,
        clip_norm=1.0,
        execute=execute,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mean", default="tokens", choices=["tokens", "sequences", "constant"])
    parser.add_argument("--micro-tokens", type=int, default=256, help="tokens per micro-batch")
    parser.add_argument("--updates", type=int, default=40)
    options = parser.parse_args()
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    policy = Policy()
    reference = copy.deepcopy(policy).requires_grad_(False)
    train = make_update(policy, options.mean, wb.tokens(options.micro_tokens, mask="mask"))
    for update in range(options.updates):
        batch = rollout(policy, reference, prompts=16, group=8, draw=draw)
        step = train.step(batch)
        if update % 5 == 0:
            print(f"update {update:3}  reward {batch['reward'].mean():6.3f}  {step}")


if __name__ == "__main__":
    main()
