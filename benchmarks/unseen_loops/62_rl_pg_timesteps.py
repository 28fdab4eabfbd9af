# ruff: noqa
import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 24)
        self.head = nn.Linear(24, 3)

    def logp(self, obs, act):
        return (
            torch.log_softmax(self.head(torch.tanh(self.body(obs))), -1)
            .gather(1, act[:, None])
            .squeeze(1)
        )

    @torch.no_grad()
    def act(self, obs):
        p = torch.softmax(self.head(torch.tanh(self.body(obs))), -1)
        return torch.multinomial(p, 1).squeeze(1)


def play(policy):
    T = int(torch.randint(1, 20, (1,)))
    obs = torch.randn(T, 5)
    act = policy.act(obs)
    r = (act == (obs.sum(1) > 0).long()).float()
    ret = r.flip(0).cumsum(0).flip(0)
    return obs, act, ret


def main(iterations=5, episodes=12, micro=3):
    torch.manual_seed(37)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    baseline = 0.0
    for it in range(iterations):
        eps = [play(policy) for _ in range(episodes)]
        n_steps = sum(len(e[2]) for e in eps)
        optimizer.zero_grad()
        for i in range(0, episodes, micro):
            part = eps[i : i + micro]
            obs, act, ret = (torch.cat(t) for t in zip(*part))
            loss = -((ret - baseline) * policy.logp(obs, act)).sum() / n_steps
            loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        mean = torch.cat([e[2] for e in eps]).mean().item()
        baseline = 0.9 * baseline + 0.1 * mean
        print(f"it {it} steps {n_steps} return {mean:.2f} |g| {grad_norm:.3f}")


if __name__ == "__main__":
    main()
