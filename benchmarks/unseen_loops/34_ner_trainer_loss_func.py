# ruff: noqa
import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(40, 16)
        self.r = nn.LSTM(16, 8, bidirectional=True, batch_first=True)
        self.o = nn.Linear(16, 5)

    def forward(self, input_ids, labels=None):
        return {"logits": self.o(self.r(self.e(input_ids))[0])}


def token_loss(outputs, labels, num_items_in_batch=None):
    total = nn.functional.cross_entropy(
        outputs["logits"].flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    return total / num_items_in_batch


def rows(n):
    out = []
    for _ in range(n):
        y = torch.randint(0, 5, (12,))
        y[int(torch.randint(2, 12, (1,))) :] = -100
        out.append({"input_ids": torch.randint(0, 40, (12,)), "labels": y})
    return out


def main():
    torch.manual_seed(82)
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            out,
            per_device_train_batch_size=3,
            gradient_accumulation_steps=4,
            num_train_epochs=2,
            learning_rate=3e-3,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=2,
        )
        Trainer(
            model=Tagger(), args=args, train_dataset=rows(41), compute_loss_func=token_loss
        ).train()


if __name__ == "__main__":
    main()
