# ruff: noqa
import copy

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader


def main():
    torch.manual_seed(63)
    accelerator = Accelerator(gradient_accumulation_steps=3, cpu=True)
    unet = nn.Sequential(nn.Linear(13, 40), nn.SiLU(), nn.Linear(40, 12))
    ema = copy.deepcopy(unet).requires_grad_(False)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    loader = DataLoader(torch.randn(48, 12), batch_size=4, shuffle=True)
    unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
    global_step = 0
    for epoch in range(2):
        train_loss = 0.0
        for x in loader:
            with accelerator.accumulate(unet):
                t = torch.rand(len(x), 1)
                noise = torch.randn_like(x)
                pred = unet(torch.cat([(1 - t) * x + t * noise, t], 1))
                loss = nn.functional.mse_loss(pred, noise - x)
                train_loss += loss.item() / accelerator.gradient_accumulation_steps
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                with torch.no_grad():
                    for e, p in zip(ema.parameters(), unet.parameters()):
                        e.lerp_(p, 0.1)
                global_step += 1
                print(f"step {global_step} loss {train_loss:.4f}")
                train_loss = 0.0


if __name__ == "__main__":
    main()
