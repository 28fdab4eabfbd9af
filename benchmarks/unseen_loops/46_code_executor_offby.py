# ruff: noqa
# reduced from microsoft/CodeBERT CodeExecutor/pretrain/run.py
import torch
from torch import nn
import torch.nn.functional as F


class Seq(nn.Module):
    def __init__(self, v=30, d=20):
        super().__init__()
        self.e = nn.Embedding(v, d)
        self.g = nn.GRU(d, d, batch_first=True)
        self.o = nn.Linear(d, v)

    def forward(self, ids):
        logits = self.o(self.g(self.e(ids[:, :-1]))[0])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def forever(data, bs):
    while True:
        for idx in torch.randperm(len(data)).split(bs):
            yield data[idx]


def train(gradient_accumulation_steps=4, max_steps=5):
    torch.manual_seed(26)
    loader = forever(torch.randint(0, 30, (40, 12)), 4)
    model = Seq()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.3, 1.0, total_iters=max_steps)
    losses, step, global_step = [], 0, 0
    model.zero_grad()
    while True:
        batch = next(loader)
        model.train()
        step += 1
        loss = model(batch)
        losses.append(loss.item())
        if gradient_accumulation_steps > 1:
            loss = loss / gradient_accumulation_steps
        loss.backward()
        # update model
        if (step + 1) % gradient_accumulation_steps == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            global_step += 1
            print(f"steps: {global_step} loss: {sum(losses) / len(losses):.4f}")
            losses = []
            if global_step >= max_steps:
                break


if __name__ == "__main__":
    train()
