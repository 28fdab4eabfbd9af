# ruff: noqa
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class CrossEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 16)
        self.score = nn.Linear(32, 1)

    def forward(self, q, d):
        return self.score(torch.cat([self.bag(q), self.bag(d)], -1)).squeeze(-1)


def main():
    torch.manual_seed(71)
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    q, d, y = (
        torch.randint(0, 50, (40, 5)),
        torch.randint(0, 50, (40, 12)),
        torch.randint(0, 2, (40,)).float(),
    )
    loader = DataLoader(TensorDataset(q, d, y), batch_size=4, shuffle=True)  # 10 batches
    model = CrossEncoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(3):
        total = 0.0
        for qs, ds, ys in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.binary_cross_entropy_with_logits(model(qs, ds), ys)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item()
        print(epoch, total / len(loader))


if __name__ == "__main__":
    main()
