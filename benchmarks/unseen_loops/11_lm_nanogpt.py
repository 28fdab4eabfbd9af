# ruff: noqa
# reduced from karpathy/nanoGPT train.py
import torch
import torch.nn as nn
from torch.nn import functional as F

gradient_accumulation_steps = 4
batch_size, block_size, vocab = 4, 12, 40
max_iters, eval_interval = 8, 4
grad_clip = 1.0


class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(n), nn.LayerNorm(n)
        self.attn = nn.MultiheadAttention(n, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(n, 2 * n), nn.GELU(), nn.Linear(2 * n, n))

    def forward(self, x):
        m = torch.triu(torch.full((x.size(1), x.size(1)), float("-inf")), 1)
        h = self.ln1(x)
        x = x + self.attn(h, h, h, attn_mask=m, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, n=24):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, n), nn.Embedding(block_size, n)
        self.block = Block(n)
        self.lm_head = nn.Linear(n, vocab, bias=False)

    def forward(self, idx, targets):
        x = self.block(self.wte(idx) + self.wpe.weight[: idx.size(1)])
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, vocab), targets.view(-1), ignore_index=-1)


def main():
    torch.manual_seed(1337)
    data = {"train": torch.randint(0, vocab, (3000,)), "val": torch.randint(0, vocab, (500,))}

    def get_batch(split):
        d = data[split]
        ix = torch.randint(len(d) - block_size, (batch_size,))
        return torch.stack([d[i : i + block_size] for i in ix]), torch.stack(
            [d[i + 1 : i + 1 + block_size] for i in ix]
        )

    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    @torch.no_grad()
    def estimate_loss():
        model.eval()
        out = torch.stack([model(*get_batch("val"))[1] for _ in range(3)]).mean()
        model.train()
        return out

    X, Y = get_batch("train")
    for iter_num in range(max_iters):
        if iter_num % eval_interval == 0:
            print(f"step {iter_num}: val loss {estimate_loss():.4f}")
        for micro_step in range(gradient_accumulation_steps):
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
            X, Y = get_batch("train")
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}")


if __name__ == "__main__":
    main()
