# ruff: noqa
# reduced from keonlee9420/PortaSpeech train.py
import torch
import torch.nn as nn


class ScheduledOptim:
    def __init__(self, model, warmup=4):
        self._optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        self.warmup, self.n = warmup, 0

    def step_and_update_lr(self):
        self.n += 1
        for g in self._optimizer.param_groups:
            g["lr"] = 1e-3 * min(1.0, self.n / self.warmup)
        self._optimizer.step()

    def zero_grad(self):
        self._optimizer.zero_grad()


class Acoustic(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(30, 24)
        self.conv = nn.Conv1d(24, 24, 3, padding=1)
        self.mel = nn.Linear(24, 10)

    def forward(self, text):
        h = self.conv(self.emb(text).transpose(1, 2)).relu().transpose(1, 2)
        return self.mel(h)


def main(total_step=16, grad_acc_step=4, grad_clip_thresh=1.0):
    torch.manual_seed(8)
    text = torch.randint(0, 30, (32, 12))
    mel = torch.randn(32, 12, 10)
    model = Acoustic()
    optimizer = ScheduledOptim(model)
    step = 1
    while True:
        for idx in torch.randperm(32).split(4):
            output = model(text[idx])
            total_loss = nn.functional.l1_loss(output, mel[idx])
            total_loss = total_loss / grad_acc_step

            # Backward
            total_loss.backward()

            # Clipping gradients to avoid gradient explosion
            if step % grad_acc_step == 0:
                nn.utils.clip_grad_norm_(model.parameters(), grad_clip_thresh)

            # Update weights
            optimizer.step_and_update_lr()
            optimizer.zero_grad()

            if step % 4 == 0:
                print(
                    f"Step {step}/{total_step}, Total Loss: {total_loss.item() * grad_acc_step:.4f}"
                )
            if step == total_step:
                return
            step += 1


if __name__ == "__main__":
    main()
