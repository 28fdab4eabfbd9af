# ruff: noqa
# reduced from kimiyoung/transformer-xl pytorch/train.py (batch_chunk)
import torch
import torch.nn as nn
import torch.nn.functional as F

batch_size, batch_chunk, tgt_len, n_token = 12, 3, 8, 30


class MemRNN(nn.Module):
    def __init__(self, d=20):
        super().__init__()
        self.emb = nn.Embedding(n_token, d)
        self.rnn = nn.GRU(d, d)
        self.crit = nn.Linear(d, n_token)

    def forward(self, data, target, mem):
        h, new = self.rnn(self.emb(data), mem)
        loss = F.cross_entropy(
            self.crit(h).flatten(0, 1), target.flatten(), reduction="none"
        ).view_as(target)
        return loss, new.detach()


def train():
    torch.manual_seed(30)
    assert batch_size % batch_chunk == 0
    stream = torch.randint(0, n_token, (tgt_len * 6 + 1, batch_size))
    model = MemRNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    train_step, train_loss = 0, 0.0
    for epoch in range(2):
        mems = [None for _ in range(batch_chunk)]
        for start in range(0, tgt_len * 6, tgt_len):
            data = stream[start : start + tgt_len]
            target = stream[start + 1 : start + 1 + tgt_len]
            model.zero_grad()
            data_chunks = torch.chunk(data, batch_chunk, 1)
            target_chunks = torch.chunk(target, batch_chunk, 1)
            for i in range(batch_chunk):
                loss, mems[i] = model(
                    data_chunks[i].contiguous(), target_chunks[i].contiguous(), mems[i]
                )
                loss = loss.float().mean() / batch_chunk
                loss.backward()
                train_loss += loss.float().item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            train_step += 1
            scheduler.step()
            if train_step % 4 == 0:
                print(f"| epoch {epoch} step {train_step} | loss {train_loss / 4:5.2f}")
                train_loss = 0


if __name__ == "__main__":
    train()
