# ruff: noqa
import torch
from torch import nn


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 32)
        self.pi = nn.Linear(32, 4)
        self.v = nn.Linear(32, 1)

    def forward(self, o):
        h = torch.tanh(self.base(o))
        return torch.distributions.Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


def collect(model, n):
    obs = torch.randn(n, 6)
    with torch.no_grad():
        dist, v = model(obs)
        act = dist.sample()
    ret = (act == obs[:, :4].argmax(1)).float() + 0.1 * torch.randn(n)
    return obs, act, ret, ret - v


def learn(iterations=4, horizon=60, minibatch=6, grad_accum=4):
    torch.manual_seed(22)
    model = ActorCritic()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for it in range(iterations):
        obs, act, ret, adv = collect(model, horizon)
        for k, mb in enumerate(torch.randperm(horizon).split(minibatch)):  # 10 minibatches
            dist, v = model(obs[mb])
            pg = -(dist.log_prob(act[mb]) * adv[mb]).mean()
            vf = 0.5 * (v - ret[mb]).pow(2).mean()
            loss = pg + vf - 0.01 * dist.entropy().mean()
            (loss / grad_accum).backward()
            if (k + 1) % grad_accum == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                opt.step()
                opt.zero_grad()
        print(f"iteration {it} mean return {ret.mean():.3f}")


if __name__ == "__main__":
    learn()
