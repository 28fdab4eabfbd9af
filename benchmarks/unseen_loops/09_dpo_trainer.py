# ruff: noqa
# reduced from eric-mitchell/direct-preference-optimization trainers.py
import copy

import torch
import torch.nn.functional as F
from torch import nn


class LM(nn.Module):
    def __init__(self, v=25, d=16):
        super().__init__()
        self.e, self.r, self.o = nn.Embedding(v, d), nn.GRU(d, d, batch_first=True), nn.Linear(d, v)

    def forward(self, ids):
        return self.o(self.r(self.e(ids))[0])


def get_batch_logps(logits, labels):
    logp = logits[:, :-1].log_softmax(-1).gather(2, labels[:, 1:, None]).squeeze(2)
    return logp.sum(-1)


def slice_batch(batch, i, n):
    size = len(batch["chosen"]) // n
    return {k: v[i * size : (i + 1) * size] for k, v in batch.items()}


class BasicTrainer:
    def __init__(self, policy, reference, lr=1e-3, beta=0.1, gradient_accumulation_steps=4):
        self.policy, self.reference, self.beta = policy, reference, beta
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.optimizer = torch.optim.RMSprop(policy.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda s: min(1.0, (s + 1) / 3)
        )

    def get_batch_loss(self, batch):
        pc = get_batch_logps(self.policy(batch["chosen"]), batch["chosen"])
        pr = get_batch_logps(self.policy(batch["rejected"]), batch["rejected"])
        with torch.no_grad():
            rc = get_batch_logps(self.reference(batch["chosen"]), batch["chosen"])
            rr = get_batch_logps(self.reference(batch["rejected"]), batch["rejected"])
        return -F.logsigmoid(self.beta * ((pc - pr) - (rc - rr))).mean()

    def train(self, batches):
        for n, batch in enumerate(batches):
            losses = []
            for microbatch_idx in range(self.gradient_accumulation_steps):
                micro = slice_batch(batch, microbatch_idx, self.gradient_accumulation_steps)
                loss = self.get_batch_loss(micro)
                (loss / self.gradient_accumulation_steps).backward()
                losses.append(loss.item())
            grad_norm = nn.utils.clip_grad_norm_(self.policy.parameters(), 10.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            print(
                f"train stats after {n + 1} batches: loss {sum(losses) / len(losses):.4f} grad {grad_norm:.3f}"
            )


def main():
    torch.manual_seed(44)
    policy = LM()
    reference = copy.deepcopy(policy).requires_grad_(False)
    data = [
        {"chosen": torch.randint(0, 25, (8, 9)), "rejected": torch.randint(0, 25, (8, 9))}
        for _ in range(5)
    ]
    BasicTrainer(policy, reference).train(data)


if __name__ == "__main__":
    main()
