# graph
"""A trainer counts steps in attributes that its loss does not read."""

import os

import torch

import wholebatch as wb

torch.manual_seed(0)


class Trainer:
    def __init__(self):
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        self.global_step, self.best = 0, float("inf")
        self.train = wb.WholeBatch(
            self.model,
            torch.optim.SGD(self.model.parameters(), lr=0.05),
            loss=self.compute_loss,
            micro_batch=4,
            execute=os.environ["EXECUTE"],
        )

    def compute_loss(self, model, x):
        return (model(x) - x).square().sum(-1)

    def fit(self):
        for _ in range(8):
            step = self.train.step(torch.randn(8, 8))
            self.global_step += 1
            self.best = min(self.best, step.loss)
            yield step.loss


trainer = Trainer()
losses = list(trainer.fit())
model = trainer.model
