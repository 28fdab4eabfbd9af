# ruff: noqa
import random

import torch
from torch import nn

MASK, VOCAB, IGNORE = 1, 50, -100


class TinyBert(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, 32)
        self.pos = nn.Parameter(torch.randn(1, 20, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 1)
        self.out = nn.Linear(32, VOCAB)

    def forward(self, x):
        return self.out(self.enc(self.tok(x) + self.pos[:, : x.shape[1]]))


def mask_tokens(x, rng):
    labels = torch.full_like(x, IGNORE)
    x = x.clone()
    for row in range(x.shape[0]):
        n = rng.choice([1, 2, 6, 12])
        idx = torch.tensor(rng.sample(range(x.shape[1]), n))
        labels[row, idx] = x[row, idx]
        x[row, idx] = MASK
    return x, labels


def train(epochs=2, accum_steps=4, batch_size=2):
    torch.manual_seed(1)
    rng = random.Random(1)
    corpus = torch.randint(2, VOCAB, (24, 20))
    model = TinyBert()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss(ignore_index=IGNORE)
    for epoch in range(epochs):
        perm = torch.randperm(len(corpus))
        total = 0.0
        optim.zero_grad()
        for i, idx in enumerate(perm.split(batch_size)):
            x, y = mask_tokens(corpus[idx], rng)
            loss = loss_fn(model(x).view(-1, VOCAB), y.view(-1))
            (loss / accum_steps).backward()
            total += loss.item()
            if (i + 1) % accum_steps == 0:
                optim.step()
                optim.zero_grad()
        print(f"epoch {epoch} mlm loss {total / (i + 1):.3f}")


if __name__ == "__main__":
    train()
