# ruff: noqa
import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class GRULM(nn.Module):
    def __init__(self, v=40, d=20):
        super().__init__()
        self.e, self.r, self.o = nn.Embedding(v, d), nn.GRU(d, d, batch_first=True), nn.Linear(d, v)

    def forward(self, input_ids):
        return self.o(self.r(self.e(input_ids))[0])


class SmoothTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs)
        loss = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1),
            labels[:, 1:].flatten(),
            ignore_index=-100,
            label_smoothing=0.1,
        )
        return (loss, logits) if return_outputs else loss


def rows(n):
    out = []
    for _ in range(n):
        ids = torch.randint(1, 40, (18,))
        labels = ids.clone()
        labels[int(torch.randint(3, 18, (1,))) :] = -100
        out.append({"input_ids": ids, "labels": labels})
    return out


def main():
    torch.manual_seed(84)
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            out,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=4,
            num_train_epochs=2,
            learning_rate=3e-3,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=2,
            remove_unused_columns=False,
        )
        SmoothTrainer(model=GRULM(), args=args, train_dataset=rows(24)).train()


if __name__ == "__main__":
    main()
