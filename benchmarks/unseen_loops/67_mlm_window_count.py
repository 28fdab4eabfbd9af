# ruff: noqa
import itertools

import torch
from torch import nn

VOCAB = 40


class Encoder(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d)
        self.mix = nn.Conv1d(d, d, 5, padding=2)
        self.out = nn.Linear(d, VOCAB)

    def forward(self, ids):
        h = self.emb(ids)
        return self.out(h + self.mix(h.transpose(1, 2)).relu().transpose(1, 2))


def collate(rows, gen):
    ids = torch.stack(rows)
    prob = torch.rand(len(rows), 1, generator=gen) * 0.5
    mask = torch.rand(ids.shape, generator=gen) < prob
    mask[:, 0] = True
    labels = torch.where(mask, ids, torch.tensor(-100))
    return torch.where(mask, torch.tensor(0), ids), labels


def windows(it, k):
    it = iter(it)
    while chunk := list(itertools.islice(it, k)):
        yield chunk


def main(k=4, bs=3, epochs=2):
    torch.manual_seed(31)
    gen = torch.Generator().manual_seed(31)
    data = torch.randint(1, VOCAB, (40, 16))
    model = Encoder()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    crit = nn.CrossEntropyLoss(ignore_index=-100, reduction="sum")
    for epoch in range(epochs):
        order = torch.randperm(len(data)).tolist()
        loader = [
            collate([data[j] for j in order[i : i + bs]], gen) for i in range(0, len(order), bs)
        ]
        for window in windows(loader, k):
            n = sum((y != -100).sum().item() for _, y in window)
            opt.zero_grad()
            total = 0.0
            for x, y in window:
                loss = crit(model(x).flatten(0, 1), y.flatten()) / n
                loss.backward()
                total += loss.item()
            opt.step()
        print(f"epoch {epoch}: {total:.3f} ({n} masked tokens in the last update)")


if __name__ == "__main__":
    main()
