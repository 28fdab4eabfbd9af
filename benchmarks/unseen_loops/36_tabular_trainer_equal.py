# ruff: noqa
import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x, labels=None):
        pred = self.net(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(pred, labels), "logits": pred}


def main():
    torch.manual_seed(81)
    data = [{"x": torch.randn(6), "labels": torch.randn(())} for _ in range(48)]
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            out,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=3,
            num_train_epochs=2,
            learning_rate=1e-2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=2,
            max_grad_norm=1.0,
        )
        Trainer(model=Regressor(), args=args, train_dataset=data).train()


if __name__ == "__main__":
    main()
