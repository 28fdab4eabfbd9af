# ruff: noqa
import torch
from torch import nn


class SAGE(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.a, self.b = nn.Linear(5, d), nn.Linear(d, d)
        self.out = nn.Linear(d, 4)

    def forward(self, x, adj):
        h = torch.relu(self.a(adj @ x))
        return self.out(torch.relu(self.b(adj @ h)) + h)


def make_graph(gen):
    n = int(torch.randint(4, 20, (1,), generator=gen))
    adj = (torch.rand(n, n, generator=gen) < 0.4).float() + torch.eye(n)
    return (
        torch.randn(n, 5, generator=gen),
        adj / adj.sum(1, keepdim=True),
        torch.randint(0, 4, (n,), generator=gen),
    )


class NodeTrainer:
    """Every micro-batch is one graph; an update is the mean over all nodes of `accum` graphs."""

    def __init__(self, model, accum):
        self.model, self.accum = model, accum
        self.opt = torch.optim.Adam(model.parameters(), lr=5e-3)
        self.sched = torch.optim.lr_scheduler.StepLR(self.opt, 3, 0.5)

    def epoch(self, graphs):
        total = 0.0
        for s in range(0, len(graphs), self.accum):
            group = graphs[s : s + self.accum]
            nodes = sum(len(y) for _, _, y in group)
            self.opt.zero_grad()
            for x, adj, y in group:
                loss = nn.functional.cross_entropy(self.model(x, adj), y)
                weighted = loss * len(y) / nodes
                weighted.backward()
                total += loss.item() * len(y)
            self.opt.step()
            self.sched.step()
        return total / sum(len(y) for _, _, y in graphs)


def main():
    torch.manual_seed(41)
    gen = torch.Generator().manual_seed(41)
    graphs = [make_graph(gen) for _ in range(14)]
    tr = NodeTrainer(SAGE(), accum=4)
    for e in range(2):
        print(e, tr.epoch(graphs))


if __name__ == "__main__":
    main()
