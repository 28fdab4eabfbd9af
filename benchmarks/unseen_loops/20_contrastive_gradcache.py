# ruff: noqa
# the two passes of luyug/GradCache, written out
import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    def __init__(self, vocab=60, dim=24):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, dim)
        self.proj = nn.Linear(dim, 12)

    def forward(self, ids):
        return F.normalize(self.proj(self.emb(ids)), dim=-1)


def train(epochs=2, batch=24, chunk=6, temperature=0.1):
    torch.manual_seed(39)
    queries, docs = torch.randint(0, 60, (72, 6)), torch.randint(0, 60, (72, 14))
    q_enc, d_enc = Encoder(), Encoder()
    params = list(q_enc.parameters()) + list(d_enc.parameters())
    optimizer = torch.optim.AdamW(params, lr=2e-3)
    for epoch in range(epochs):
        for idx in torch.randperm(72).split(batch):
            optimizer.zero_grad()
            with torch.no_grad():
                q = torch.cat([q_enc(queries[c]) for c in idx.split(chunk)])
                d = torch.cat([d_enc(docs[c]) for c in idx.split(chunk)])
            q.requires_grad_()
            d.requires_grad_()
            loss = F.cross_entropy(q @ d.T / temperature, torch.arange(len(idx)))
            gq, gd = torch.autograd.grad(loss, [q, d])
            for c, a, b in zip(idx.split(chunk), gq.split(chunk), gd.split(chunk)):
                surrogate = (q_enc(queries[c]) * a).sum() + (d_enc(docs[c]) * b).sum()
                surrogate.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
