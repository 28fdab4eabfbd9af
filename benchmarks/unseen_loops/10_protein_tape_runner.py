# ruff: noqa
# reduced from songlab-cal/tape tape/training.py (BackwardRunner)
import torch
import torch.nn as nn


class BackwardRunner:
    def __init__(
        self, model, optimizer, scheduler, gradient_accumulation_steps=1, max_grad_norm=1.0
    ):
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.max_grad_norm = max_grad_norm
        self._global_step = 0

    def forward(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def backward(self, loss):
        loss = loss / self.gradient_accumulation_steps
        loss.backward()

    def step(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.scheduler.step()
        self._global_step += 1


class ProteinNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.EmbeddingBag(25, 16)
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc(self.emb(x))


def run_train_epoch(epoch, loader, runner, k):
    losses = []
    for step, batch in enumerate(loader):
        loss = runner.forward(batch)
        runner.backward(loss)
        losses.append(loss.item())
        if (step + 1) % k == 0:
            runner.step()
    print(f"[Ep: {epoch}][Loss: {sum(losses) / len(losses):.5g}]")


def main(gradient_accumulation_steps=4):
    torch.manual_seed(16)
    loader = [(torch.randint(0, 25, (4, 30)), torch.randint(0, 4, (4,))) for _ in range(8)]
    model = ProteinNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 3))
    runner = BackwardRunner(model, optimizer, scheduler, gradient_accumulation_steps)
    for epoch in range(3):
        run_train_epoch(epoch, loader, runner, gradient_accumulation_steps)


if __name__ == "__main__":
    main()
