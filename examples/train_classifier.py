"""Train a classifier on 1,797 handwritten digits: one update per `--steps` micro-batches.

    python examples/train_classifier.py
    python examples/train_classifier.py --resume   # after a stop, from the last checkpoint

The last micro-batch of an epoch is smaller, and so is the last window. Their updates are exact too.
"""

import argparse
import math
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import wholebatch as wb


def make_model():
    # GroupNorm normalises each image alone. For BatchNorm, use wb.WholeBatch: docs/batchnorm.md.
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.GroupNorm(8, 32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def make_loaders(micro_batch, seed):
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.get_default_dtype())[:, None]
    labels = torch.tensor(digits.target)
    train = TensorDataset(images[:1437], labels[:1437])
    test = TensorDataset(images[1437:], labels[1437:])
    order = torch.Generator().manual_seed(seed)  # its state is saved, so a resumed run goes on
    return DataLoader(train, micro_batch, shuffle=True, generator=order), DataLoader(test, 256)


@torch.no_grad()
def evaluate(model, loader, device):
    """Return loss and accuracy over all samples: sums, divided once."""
    model.eval()
    loss = correct = samples = 0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        logits = model(x)
        loss += F.cross_entropy(logits, y, reduction="sum").item()
        correct += (logits.argmax(1) == y).sum().item()
        samples += len(y)
    return loss / samples, correct / samples


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4, help="micro-batches per update")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--precision", choices=["full", "bf16", "fp16"], default="full")
    parser.add_argument("--save", type=Path, default=Path("classifier.pt"))
    parser.add_argument("--save-every", type=int, default=50, help="updates")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader, test_loader = make_loaders(args.micro_batch, args.seed)
    model = make_model().to(device)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    updates = args.epochs * math.ceil(len(loader) / args.steps)  # the short last window updates too
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=updates)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    acc = wb.Accumulator(
        model,
        optimizer,
        steps=args.steps,
        clip_norm=1.0,
        scheduler=scheduler,
        close=wb.Close(ema=ema, scaler=scaler),
    )
    state = {"model": model, "ema": ema, "optimizer": optimizer, "windows": acc}
    if args.resume:
        saved = torch.load(args.save, map_location=device, weights_only=True)
        for name, part in state.items():
            part.load_state_dict(saved[name])
        if scheduler.total_steps != updates:
            parser.error(f"{args.save}: a run of {scheduler.total_steps} updates, not {updates}")

    half = torch.bfloat16 if args.precision == "bf16" else torch.float16
    for epoch in range(acc.epoch, args.epochs):
        model.train()
        bar = tqdm(acc.over(loader), total=len(loader), desc=f"epoch {epoch + 1}")
        for x, y in bar:
            x, y = x.to(device), y.to(device)
            with torch.autocast(device.type, half, enabled=args.precision != "full"):
                loss = F.cross_entropy(model(x), y)
            step = acc.backward(mean=loss, units=len(y))
            if step is not None:  # the window is complete: its update was made
                bar.set_postfix(loss=f"{step.loss:.3f}", lr=f"{scheduler.get_last_lr()[0]:.1e}")
                if step.update % args.save_every == 0 or step.update == updates:
                    torch.save({name: part.state_dict() for name, part in state.items()}, args.save)
        loss, accuracy = evaluate(ema.module, test_loader, device)
        print(f"epoch {epoch + 1}: test loss {loss:.3f}, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
