# ruff: noqa
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

N_MASK = 3


class Enc(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.c, self.o = (
            nn.Embedding(30, 16),
            nn.Conv1d(16, 16, 3, padding=1),
            nn.Linear(16, 30),
        )

    def forward(self, x):
        return self.o(self.c(self.e(x).transpose(1, 2)).relu().transpose(1, 2))


def collate(rows):
    x = torch.stack(rows)
    pos = torch.rand(x.shape).argsort(1)[:, :N_MASK]  # always three per row
    y = torch.full_like(x, -100).scatter(1, pos, x.gather(1, pos))
    return x.scatter(1, pos, 0), y


def main():
    torch.manual_seed(65)
    acc = Accelerator(gradient_accumulation_steps=2, cpu=True)
    loader = DataLoader(
        torch.randint(1, 30, (40, 12)), batch_size=5, shuffle=True, collate_fn=collate
    )
    model = Enc()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, opt, loader = acc.prepare(model, opt, loader)
    for epoch in range(2):
        for x, y in loader:
            with acc.accumulate(model):
                loss = nn.functional.cross_entropy(
                    model(x).flatten(0, 1), y.flatten(), ignore_index=-100
                )
                acc.backward(loss)
                opt.step()
                opt.zero_grad()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
