"""Policy gradients with advantages that are normalised over the whole batch.

    python examples/normalised_advantage.py

`(advantage - mean) / std` over a micro-batch is not the same as over the batch: the usual PPO code
changes its update when the batch is split. Here the policy's log-probabilities and the critic's
values are encoded per micro-batch, and `loss` normalises over all of them. The advantage depends on
the critic, so the gradient flows through the mean and the standard deviation too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import wholebatch as wb

Batch = dict[str, Tensor]


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.policy = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))
        self.critic = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))


def encode(agent: Agent, micro: Batch) -> dict[str, Tensor]:
    chances = agent.policy(micro["state"]).log_softmax(-1)
    return {
        "log_chance": chances.gather(1, micro["action"][:, None])[:, 0],
        "value": agent.critic(micro["state"])[:, 0],
        "reward": micro["reward"],
    }


def loss(all: dict[str, Tensor]) -> wb.Loss:
    advantage = all["reward"] - all["value"]
    normalised = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    per_sample = -all["log_chance"] * normalised + 0.5 * advantage.square()
    return wb.Loss(per_sample.sum(), len(per_sample))


def rollout(number: int, seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    state = torch.randn(number, 6, generator=draw, dtype=torch.float64)
    action = torch.randint(0, 4, (number,), generator=draw)
    reward = state[:, 0] * (action == 1) + 0.1 * torch.randn(number, generator=draw)
    return {"state": state, "action": action, "reward": reward.double()}


def gradient(how: str, micro_batch: int = 16) -> list[Tensor]:
    """What the optimizer sees: undivided, by wb.Coupled, or by plain accumulation."""
    agent = Agent().double()
    optimizer = torch.optim.SGD(agent.parameters(), lr=1.0)
    before = [p.detach().clone() for p in agent.parameters()]
    batch = rollout(100, 1)
    if how == "wb.Coupled":
        train = wb.WholeBatch(
            agent, optimizer, loss=wb.Coupled(encode, loss), micro_batch=micro_batch
        )
        train.step(batch)
    else:
        parts = [batch] if how == "undivided" else wb.split(batch, micro_batch)
        for part in parts:
            (loss(encode(agent, part)).total / 100).backward()
        optimizer.step()
    return [a - b.detach() for a, b in zip(before, agent.parameters(), strict=True)]


def main() -> dict[str, float]:
    reference = gradient("undivided")
    errors: dict[str, float] = {}
    for how in ("wb.Coupled", "plain accumulation"):
        made = gradient(how)
        above = sum(float((a - b).square().sum()) for a, b in zip(made, reference, strict=True))
        errors[how] = (above / sum(float(b.square().sum()) for b in reference)) ** 0.5
        print(f"{how:20} gradient off by {errors[how]:.1e}")
    print(
        f"Shown: the gradient is off by {errors['plain accumulation']:.1%} in the usual loop, by "
        f"{errors['wb.Coupled']:.0e} with wb.Coupled."
    )
    return errors


if __name__ == "__main__":
    main()
