# ruff: noqa
# reduced from OpenNMT/OpenNMT-py onmt/trainer.py
import torch
from torch import nn

PAD = 0


class Seq2Seq(nn.Module):
    def __init__(self, v=30, d=24):
        super().__init__()
        self.src, self.tgt = (
            nn.Embedding(v, d, padding_idx=PAD),
            nn.Embedding(v, d, padding_idx=PAD),
        )
        self.enc, self.dec = nn.GRU(d, d, batch_first=True), nn.GRU(d, d, batch_first=True)
        self.generator = nn.Linear(d, v)

    def forward(self, src, tgt_in):
        _, h = self.enc(self.src(src))
        return self.generator(self.dec(self.tgt(tgt_in), h)[0])


def batch_iter(n_batches, gen):
    for _ in range(n_batches):
        src = torch.randint(1, 30, (3, 7), generator=gen)
        tgt = torch.randint(1, 30, (3, 10), generator=gen)
        for row, length in enumerate(torch.randint(2, 11, (3,), generator=gen)):
            tgt[row, length:] = PAD
        yield src, tgt


class Trainer:
    def __init__(self, model, optim, accum_count):
        self.model, self.optim, self.accum_count = model, optim, accum_count
        self.criterion = nn.NLLLoss(ignore_index=PAD, reduction="sum")

    def _accum_batches(self, iterator):
        batches, normalization = [], 0
        for batch in iterator:
            batches.append(batch)
            normalization += batch[1][:, 1:].ne(PAD).sum().item()
            if len(batches) == self.accum_count:
                yield batches, normalization
                batches, normalization = [], 0
        if batches:
            yield batches, normalization

    def train(self, iterator):
        for i, (batches, normalization) in enumerate(self._accum_batches(iterator)):
            self._gradient_accumulation(batches, normalization, i)

    def _gradient_accumulation(self, true_batches, normalization, i):
        self.optim.zero_grad(set_to_none=True)
        total = 0.0
        for src, tgt in true_batches:
            scores = self.model(src, tgt[:, :-1]).log_softmax(-1)
            loss = self.criterion(scores.flatten(0, 1), tgt[:, 1:].flatten())
            total += loss.item()
            loss = loss / normalization
            loss.backward()
        self.optim.step()
        print(f"Step {i}; xent: {total / normalization:.3f}; {normalization} tokens")


def main():
    torch.manual_seed(43)
    model = Seq2Seq()
    trainer = Trainer(model, torch.optim.Adam(model.parameters(), 2e-3), accum_count=4)
    for epoch in range(2):
        trainer.train(batch_iter(10, torch.Generator().manual_seed(epoch)))


if __name__ == "__main__":
    main()
