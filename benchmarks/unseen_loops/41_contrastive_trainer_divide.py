# ruff: noqa
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainingArguments


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.proj = nn.EmbeddingBag(60, 24), nn.Linear(24, 12)

    def forward(self, ids):
        return F.normalize(self.proj(self.bag(ids)), dim=-1)


class TripletTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        a, p, n = (model(inputs[k]) for k in ("anchor", "positive", "negative"))
        loss = F.triplet_margin_loss(a, p, n, margin=0.5)
        loss = loss / self.args.gradient_accumulation_steps
        return (loss, a) if return_outputs else loss


def main():
    torch.manual_seed(86)
    data = [
        {k: torch.randint(0, 60, (8,)) for k in ("anchor", "positive", "negative")}
        for _ in range(48)
    ]
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            out,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4,
            num_train_epochs=2,
            learning_rate=1e-2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=2,
            remove_unused_columns=False,
        )
        TripletTrainer(model=Embedder(), args=args, train_dataset=data).train()


if __name__ == "__main__":
    main()
