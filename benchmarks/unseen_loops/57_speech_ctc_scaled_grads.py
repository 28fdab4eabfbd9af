# ruff: noqa
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(6, 20, 3, padding=1)
        self.out = nn.Linear(20, 10)

    def forward(self, x):
        return self.out(self.conv(x.transpose(1, 2)).relu().transpose(1, 2)).log_softmax(-1)


class Utterances(torch.utils.data.Dataset):
    def __init__(self, n=22):
        g = torch.Generator().manual_seed(38)
        self.items = []
        for _ in range(n):
            frames = int(torch.randint(16, 40, (1,), generator=g))
            toks = torch.randint(1, 10, (int(torch.randint(2, 7, (1,), generator=g)),), generator=g)
            self.items.append((torch.randn(frames, 6, generator=g), toks))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(batch):
    xs, ys = zip(*batch)
    return (
        nn.utils.rnn.pad_sequence(xs, batch_first=True),
        torch.cat(ys),
        torch.tensor([len(x) for x in xs]),
        torch.tensor([len(y) for y in ys]),
    )


def main(accum_grad=4):
    torch.manual_seed(38)
    loader = torch.utils.data.DataLoader(
        Utterances(), batch_size=2, shuffle=True, collate_fn=collate
    )
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        tokens, pending, total = 0, 0, 0.0

        def update():
            nonlocal tokens, pending
            for p in model.parameters():
                p.grad.div_(tokens)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
            tokens = pending = 0

        for x, y, xl, yl in loader:
            lp = model(x).transpose(0, 1)
            loss = nn.functional.ctc_loss(lp, y, xl, yl, reduction="sum", zero_infinity=True)
            loss.backward()
            total += loss.item()
            tokens += int(yl.sum())
            pending += 1
            if pending == accum_grad:
                update()
        if pending:
            update()
        print(f"epoch {epoch} ctc {total:.2f}")


if __name__ == "__main__":
    main()
