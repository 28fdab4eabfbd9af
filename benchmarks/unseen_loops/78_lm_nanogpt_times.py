# ruff: noqa
# reduced from karpathy/nanoGPT train.py
import math
import time

import torch
import torch.nn as nn
from torch.nn import functional as F

batch_size = 4
block_size = 16
gradient_accumulation_steps = 4
max_iters = 6
learning_rate, min_lr, warmup_iters = 1e-2, 1e-3, 2
grad_clip = 1.0
vocab = 48


class GPT(nn.Module):
    def __init__(self, n=32):
        super().__init__()
        self.wte = nn.Embedding(vocab, n)
        self.wpe = nn.Embedding(block_size, n)
        self.ln = nn.LayerNorm(n)
        self.mlp = nn.Sequential(nn.Linear(n, 4 * n), nn.GELU(), nn.Linear(4 * n, n))
        self.head = nn.Linear(n, vocab, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        x = x + self.mlp(self.ln(x))
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, vocab), targets.view(-1))


def main():
    torch.manual_seed(1337)
    data = torch.randint(0, vocab, (2000,))

    def get_batch():
        ix = torch.randint(len(data) - block_size, (batch_size,))
        return (
            torch.stack([data[i : i + block_size] for i in ix]),
            torch.stack([data[i + 1 : i + 1 + block_size] for i in ix]),
        )

    def get_lr(it):
        if it < warmup_iters:
            return learning_rate * (it + 1) / warmup_iters
        ratio = (it - warmup_iters) / (max_iters - warmup_iters)
        return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)

    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    X, Y = get_batch()
    t0 = time.time()
    for iter_num in range(max_iters):
        for g in optimizer.param_groups:
            g["lr"] = get_lr(iter_num)
        for micro_step in range(gradient_accumulation_steps):
            logits, loss = model(X, Y)
            loss = loss * gradient_accumulation_steps
            X, Y = get_batch()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(
            f"iter {iter_num}: loss {loss.item() / gradient_accumulation_steps:.4f}, {(time.time() - t0) * 1000:.1f}ms"
        )


if __name__ == "__main__":
    main()
