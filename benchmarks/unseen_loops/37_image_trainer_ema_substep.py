# ruff: noqa
import copy
import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Flatten(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 3))

    def forward(self, x, labels=None):
        logits = self.f(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class EMACallback(TrainerCallback):
    def __init__(self, model, decay=0.9):
        self.ema = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def _update(self, model):
        for e, p in zip(self.ema.parameters(), model.parameters()):
            e.mul_(self.decay).add_(p, alpha=1 - self.decay)

    def on_substep_end(self, args, state, control, model=None, **kwargs):
        self._update(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self._update(model)


def main():
    torch.manual_seed(87)
    model = Net()
    data = [
        {"x": torch.randn(3, 4, 4), "labels": int(torch.randint(0, 3, (1,)))} for _ in range(48)
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
        )
        Trainer(model=model, args=args, train_dataset=data, callbacks=[EMACallback(model)]).train()


if __name__ == "__main__":
    main()
