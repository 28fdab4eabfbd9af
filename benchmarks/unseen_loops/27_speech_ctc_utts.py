# ruff: noqa
import torch
from torch import nn


class CTCModel(nn.Module):
    def __init__(self, n_mels=8, vocab=12):
        super().__init__()
        self.rnn = nn.GRU(n_mels, 24, batch_first=True)
        self.out = nn.Linear(24, vocab)

    def forward(self, x):
        return self.out(self.rnn(x)[0]).log_softmax(-1)


def make_batch(n, gen):
    T = 40
    lens = torch.randint(1, 15, (n,), generator=gen)
    targets = torch.randint(1, 12, (n, 15), generator=gen)
    return torch.randn(n, T, 8, generator=gen), targets, torch.full((n,), T), lens


def per_token_ctc(logp, targets, in_lens, out_lens):
    total = nn.functional.ctc_loss(
        logp.transpose(0, 1), targets, in_lens, out_lens, reduction="sum"
    )
    return total / out_lens.sum()


def main():
    gen = torch.Generator().manual_seed(17)
    torch.manual_seed(17)
    model = CTCModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    sizes = [3, 3, 3, 1] * 4
    windows = [sizes[i : i + 4] for i in range(0, 16, 4)]
    for update, window in enumerate(windows):
        n_total = sum(window)
        logged = 0.0
        for n in window:
            x, tgt, il, tl = make_batch(n, gen)
            loss = per_token_ctc(model(x), tgt, il, tl)
            weighted = loss * (x.shape[0] / n_total)
            weighted.backward()
            logged += weighted.item()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"update {update} ctc {logged:.3f}")


if __name__ == "__main__":
    main()
