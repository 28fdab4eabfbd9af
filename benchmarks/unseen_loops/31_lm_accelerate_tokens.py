# ruff: noqa
# after the by-tokens example of the Accelerate documentation
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader


class LM(nn.Module):
    def __init__(self, v=30, d=20):
        super().__init__()
        self.e, self.r, self.o = nn.Embedding(v, d), nn.GRU(d, d, batch_first=True), nn.Linear(d, v)

    def forward(self, x):
        return self.o(self.r(self.e(x))[0])


def collate(rows):
    n = max(len(r) for r in rows)
    ids = torch.zeros(len(rows), n, dtype=torch.long)
    labels = torch.full((len(rows), n), -100)
    for i, r in enumerate(rows):
        ids[i, : len(r)] = r
        labels[i, : len(r) - 1] = r[1:]
    return ids, labels


def main(gradient_accumulation_steps=4):
    torch.manual_seed(61)
    accelerator = Accelerator(gradient_accumulation_steps=gradient_accumulation_steps, cpu=True)
    data = [torch.randint(1, 30, (int(n),)) for n in torch.randint(4, 20, (42,))]
    loader = DataLoader(data, batch_size=3, collate_fn=collate, shuffle=True)
    model = LM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss(ignore_index=-100, reduction="sum")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        iterator = iter(loader)
        total_updates = -(-len(loader) // gradient_accumulation_steps)
        for update in range(total_updates):
            batch_samples = []
            for _ in range(gradient_accumulation_steps):
                try:
                    batch_samples.append(next(iterator))
                except StopIteration:
                    break
            num_items = sum((y != -100).sum() for _, y in batch_samples)
            num_items = accelerator.gather(num_items).sum().item()
            losses = []
            for x, y in batch_samples:
                loss = criterion(model(x).flatten(0, 1), y.flatten())
                loss = loss * gradient_accumulation_steps * accelerator.num_processes / num_items
                accelerator.backward(loss)
                losses.append(loss.item() / gradient_accumulation_steps)
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch} loss {sum(losses):.3f} tokens {num_items}")


if __name__ == "__main__":
    main()
