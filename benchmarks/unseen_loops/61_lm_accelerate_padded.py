# ruff: noqa
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(40, 24)
        self.lstm = nn.LSTM(24, 24, batch_first=True)
        self.head = nn.Linear(24, 40)

    def forward(self, ids, labels):
        logits = self.head(self.lstm(self.emb(ids))[0])
        return nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )


def collate(rows):
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"ids": ids, "labels": ids.masked_fill(ids == 0, -100)}


def main():
    torch.manual_seed(67)
    lengths = torch.randint(3, 30, (32,)).tolist()
    data = [torch.randint(1, 40, (n,)) for n in lengths]
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(data, batch_size=1, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for epoch in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}: {loss.item():.3f}")


if __name__ == "__main__":
    main()
