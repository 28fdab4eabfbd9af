# ruff: noqa
import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2)
        self.fc = nn.Linear(8 * 9, 4)

    def forward(self, pixel_values, labels=None):
        return {"logits": self.fc(self.conv(pixel_values).relu().flatten(1))}


def main():
    torch.manual_seed(83)
    data = [
        {"pixel_values": torch.randn(3, 8, 8), "labels": int(torch.randint(0, 4, (1,)))}
        for _ in range(38)
    ]

    def loss_func(outputs, labels, num_items_in_batch=None):
        return (
            nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
            / num_items_in_batch
        )

    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            out,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4,
            num_train_epochs=2,
            learning_rate=5e-3,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
        )
        Trainer(model=Net(), args=args, train_dataset=data, compute_loss_func=loss_func).train()


if __name__ == "__main__":
    main()
