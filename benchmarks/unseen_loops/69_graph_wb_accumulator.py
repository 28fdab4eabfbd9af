# ruff: noqa
import torch
from torch import nn

import wholebatch as wb


class GNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.o = nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, x, adj):
        return self.o(torch.relu(self.a(adj @ x)))


def main():
    torch.manual_seed(55)
    graphs = []
    for n in torch.randint(3, 15, (13,)).tolist():
        adj = (torch.rand(n, n) > 0.5).float() + torch.eye(n)
        graphs.append(
            (torch.randn(n, 4), adj / adj.sum(1, keepdim=True), torch.randint(0, 3, (n,)))
        )
    model = GNN()
    acc = wb.Accumulator(model, torch.optim.Adam(model.parameters(), lr=1e-2), steps=4)
    for epoch in range(2):
        for x, adj, y in acc.over(graphs):
            loss = nn.functional.cross_entropy(model(x, adj), y, reduction="sum")
            acc.backward(loss, units=len(y))
        print("epoch", epoch, loss.item() / len(y))


if __name__ == "__main__":
    main()
