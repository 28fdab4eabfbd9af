# ruff: noqa
import torch
from torch import nn


class GCN(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.lin1 = nn.Linear(6, hidden)
        self.lin2 = nn.Linear(hidden, hidden)
        self.readout = nn.Linear(hidden, 2)

    def forward(self, x, adj):
        h = torch.relu(self.lin1(adj @ x))
        h = torch.relu(self.lin2(adj @ h))
        return self.readout(h.mean(1))


def random_graphs(n, nodes=7):
    x = torch.randn(n, nodes, 6)
    a = (torch.rand(n, nodes, nodes) < 0.3).float()
    a = ((a + a.transpose(1, 2)) > 0).float() + torch.eye(nodes)
    return x, a / a.sum(-1, keepdim=True), torch.randint(0, 2, (n,))


def run_epoch(model, data, optimizer, accumulate_grad, micro):
    x, adj, y = data
    model.train()
    total, seen = 0.0, 0
    for step, idx in enumerate(torch.randperm(len(y)).split(micro), 1):
        loss = nn.functional.cross_entropy(model(x[idx], adj[idx]), y[idx])
        (loss / accumulate_grad).backward()
        total += loss.item() * len(idx)
        seen += len(idx)
        if step % accumulate_grad == 0:
            optimizer.zero_grad()
            optimizer.step()
    return total / seen


def main():
    torch.manual_seed(11)
    data = random_graphs(48)
    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-4)
    for epoch in range(3):
        print(epoch, run_epoch(model, data, optimizer, accumulate_grad=3, micro=4))


if __name__ == "__main__":
    main()
