# ruff: noqa
# reduced from ming024/FastSpeech2 train.py
import torch
import torch.nn as nn


class FastSpeech(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(30, 24)
        layer = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 1)
        self.mel, self.pitch = nn.Linear(24, 8), nn.Linear(24, 1)

    def forward(self, t):
        h = self.enc(self.emb(t))
        return self.mel(h), self.pitch(h).squeeze(-1)


class ScheduledOptim:
    def __init__(self, model, warm_up=2):
        self._optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
        self.warm_up, self.current_step = warm_up, 0

    def step_and_update_lr(self):
        self.current_step += 1
        lr = 24**-0.5 * min(self.current_step**-0.5, self.current_step * self.warm_up**-1.5) * 0.1
        for g in self._optimizer.param_groups:
            g["lr"] = lr
        self._optimizer.step()

    def zero_grad(self):
        self._optimizer.zero_grad()


def main(total_step=20, grad_acc_step=4, grad_clip_thresh=1.0, log_step=4):
    torch.manual_seed(48)
    text, mel, pitch = torch.randint(0, 30, (20, 9)), torch.randn(20, 9, 8), torch.randn(20, 9)
    model, step, epoch = FastSpeech(), 1, 1
    optimizer = ScheduledOptim(model)
    while True:
        for idx in torch.randperm(20).split(4):
            m, p = model(text[idx])
            losses = [nn.functional.l1_loss(m, mel[idx]), nn.functional.mse_loss(p, pitch[idx])]
            total_loss = sum(losses)
            # Backward
            total_loss = total_loss / grad_acc_step
            total_loss.backward()
            if step % grad_acc_step == 0:
                # Clipping gradients to avoid gradient explosion
                nn.utils.clip_grad_norm_(model.parameters(), grad_clip_thresh)
                # Update weights
                optimizer.step_and_update_lr()
                optimizer.zero_grad()
            if step % log_step == 0:
                print(
                    f"Step {step}/{total_step}, mel {losses[0].item():.4f} pitch {losses[1].item():.4f}"
                )
            if step == total_step:
                return
            step += 1
        epoch += 1


if __name__ == "__main__":
    main()
