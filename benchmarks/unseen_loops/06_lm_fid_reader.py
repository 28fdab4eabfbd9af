# ruff: noqa
# reduced from facebookresearch/FiD train_reader.py
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Reader(nn.Module):
    def __init__(self, vocab=40, dim=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids, labels):
        h, _ = self.rnn(self.emb(ids))
        logits = self.head(h)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def train(model, optimizer, scheduler, step, loader, opt):
    curr_loss = 0.0
    model.train()
    while step < opt.total_steps:
        for ids, labels in loader:
            step += 1
            train_loss = model(ids, labels)[0]
            train_loss.backward()

            if step % opt.accumulation_steps == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), opt.clip)
                optimizer.step()
                scheduler.step()
                model.zero_grad()

            curr_loss += train_loss.item()
            if step % opt.eval_freq == 0:
                print(f"{step} / {opt.total_steps} | train: {curr_loss / opt.eval_freq:.3f}")
                curr_loss = 0.0
            if step >= opt.total_steps:
                break


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--accumulation_steps", type=int, default=4)
    p.add_argument("--total_steps", type=int, default=24)
    p.add_argument("--eval_freq", type=int, default=8)
    p.add_argument("--clip", type=float, default=50.0)
    opt = p.parse_args()
    torch.manual_seed(0)
    data = torch.randint(0, 40, (48, 13))
    loader = DataLoader(TensorDataset(data[:, :-1], data[:, 1:]), batch_size=4, shuffle=True)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: max(0.1, 1 - s / 6))
    train(model, optimizer, scheduler, 0, loader, opt)


if __name__ == "__main__":
    main()
