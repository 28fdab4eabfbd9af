# ruff: noqa
# reduced from allenai/allennlp gradient_descent_trainer.py
import itertools
import math

import torch
from torch import nn


def lazy_groups_of(iterable, group_size):
    it = iter(iterable)
    while True:
        s = list(itertools.islice(it, group_size))
        if len(s) > 0:
            yield s
        else:
            break


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(35, 20)
        self.lstm = nn.LSTM(20, 20, batch_first=True)
        self.proj = nn.Linear(20, 35)

    def forward(self, tokens):
        logits = self.proj(self.lstm(self.emb(tokens[:, :-1]))[0])
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())}


class GradientDescentTrainer:
    def __init__(
        self,
        model,
        optimizer,
        data_loader,
        num_epochs=2,
        grad_norm=1.0,
        num_gradient_accumulation_steps=1,
    ):
        self.model, self.optimizer, self.data_loader = model, optimizer, data_loader
        self.num_epochs, self.grad_norm = num_epochs, grad_norm
        self._num_gradient_accumulation_steps = num_gradient_accumulation_steps

    def _train_epoch(self, epoch):
        groups = lazy_groups_of(self.data_loader, self._num_gradient_accumulation_steps)
        train_loss, n = 0.0, 0
        for batch_group in groups:
            self.optimizer.zero_grad()
            batch_loss = 0.0
            for batch in batch_group:
                loss = self.model(batch)["loss"]
                if torch.isnan(loss):
                    raise ValueError("nan loss encountered")
                loss = loss / len(batch_group)
                batch_loss += loss.item()
                loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_norm)
            self.optimizer.step()
            train_loss += batch_loss
            n += 1
        print(
            f"epoch {epoch}: loss {train_loss / n:.4f}, {n} updates, ppl {math.exp(train_loss / n):.1f}"
        )

    def train(self):
        for epoch in range(self.num_epochs):
            self._train_epoch(epoch)


def main():
    torch.manual_seed(42)
    batches = list(torch.randint(0, 35, (44, 9)).split(4))  # 11 batches, the last group has three
    model = LanguageModel()
    GradientDescentTrainer(
        model,
        torch.optim.Adam(model.parameters(), 3e-3),
        batches,
        num_gradient_accumulation_steps=4,
    ).train()


if __name__ == "__main__":
    main()
