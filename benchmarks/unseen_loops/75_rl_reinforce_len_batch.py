# ruff: noqa
import torch
from torch import nn
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))

    def forward(self, obs):
        return Categorical(logits=self.net(obs))


def rollout(policy, gen):
    steps = int(torch.randint(2, 25, (1,), generator=gen))
    obs = torch.randn(steps, 4, generator=gen)
    with torch.no_grad():
        act = policy(obs).sample()
    rew = (act == (obs[:, 0] > 0).long()).float()
    ret = torch.flip(torch.cumsum(torch.flip(rew, [0]), 0), [0])
    return obs, act, ret


def reinforce(batches=4, episodes_per_micro=2, micros=4):
    """One update from all timesteps of micros * episodes_per_micro episodes."""
    torch.manual_seed(7)
    gen = torch.Generator().manual_seed(7)
    policy = Policy()
    opt = torch.optim.SGD(policy.parameters(), lr=0.05)
    for b in range(batches):
        opt.zero_grad()
        episodes = [rollout(policy, gen) for _ in range(micros * episodes_per_micro)]
        mean_ret = torch.cat([e[2] for e in episodes]).mean()
        total = 0.0
        for m in range(micros):
            chunk = episodes[m * episodes_per_micro : (m + 1) * episodes_per_micro]
            obs = torch.cat([c[0] for c in chunk])
            act = torch.cat([c[1] for c in chunk])
            adv = torch.cat([c[2] for c in chunk]) - mean_ret
            loss = -(policy(obs).log_prob(act) * adv).mean()
            loss = loss * len(chunk) / len(episodes)
            loss.backward()
            total += loss.item()
        opt.step()
        print(f"update {b} pg loss {total:.4f} return {mean_ret:.2f}")


if __name__ == "__main__":
    reinforce()
