# ruff: noqa
# training step after coqui-ai/Trainer trainer/trainer.py (use_accelerate)
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Vocoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(8, 16, 3, padding=1), nn.ELU(), nn.Conv1d(16, 1, 3, padding=1)
        )

    def forward(self, mel):
        return self.net(mel)


class Trainer:
    def __init__(self, grad_accum_steps=4, grad_clip=5.0):
        self.grad_accum_steps, self.grad_clip = grad_accum_steps, grad_clip
        self.accelerator = Accelerator(gradient_accumulation_steps=grad_accum_steps, cpu=True)
        model = Vocoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        ds = TensorDataset(torch.randn(32, 8, 20), torch.randn(32, 1, 20))
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, optimizer, DataLoader(ds, batch_size=2, shuffle=True)
        )

    def optimize(self, mel, wav):
        loss_dict = {"loss": nn.functional.l1_loss(self.model(mel), wav)}
        loss_dict["loss"] = loss_dict["loss"] / float(self.grad_accum_steps)
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(loss_dict["loss"])
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), self.grad_clip)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss_dict["loss"].item() * self.grad_accum_steps

    def fit(self, epochs=2):
        for epoch in range(epochs):
            losses = [self.optimize(m, w) for m, w in self.loader]
            print(epoch, sum(losses) / len(losses))


if __name__ == "__main__":
    torch.manual_seed(66)
    Trainer().fit()
