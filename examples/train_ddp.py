"""Train a tagger on several processes: DDP, one reduction per window, texts of different lengths.

    torchrun --standalone --nproc-per-node 2 examples/train_ddp.py
    torchrun --standalone --nproc-per-node 2 examples/train_ddp.py --resume   # after a stop

The update is that of one process with all the data. The accumulator holds DDP's reduction back
until the window's last backward, counts the tokens of all ranks and divides once. Samples that
DistributedSampler repeats are dropped, and ranks may have different numbers of micro-batches.
"""

import argparse
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

import wholebatch as wb

WORDS, LENGTH, TAGS = 50, 16, 5


def make_model():
    layers = nn.Embedding(WORDS, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, TAGS)
    return nn.Sequential(*layers)


def texts(number, seed):
    """Return words and tags; tag -100 is padding and does not count."""
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(0, WORDS, (number, LENGTH), generator=draw)
    lengths = torch.randint(1, LENGTH + 1, (number, 1), generator=draw)
    return TensorDataset(words, (words % TAGS).masked_fill(torch.arange(LENGTH) >= lengths, -100))


@torch.no_grad()
def evaluate(model, data, device):
    """Return the accuracy over all tokens of all ranks: sums, divided once."""
    words, tags = (part[dist.get_rank() :: dist.get_world_size()] for part in data.tensors)
    right = (model(words.to(device)).argmax(-1) == tags.to(device)).sum()
    counts = torch.stack([right, (tags != -100).sum().to(device)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="micro-batches per update and rank")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--save", type=Path, default=Path("ddp.pt"))
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    data = texts(999, seed=1)
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, args.micro_batch, sampler=sampler)
    model = DistributedDataParallel(make_model().to(device))
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    updates = args.epochs * math.ceil(len(loader) / args.steps)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    acc = wb.Accumulator(
        model,
        optimizer,
        steps=args.steps,
        clip_norm=1.0,
        scheduler=scheduler,
        close=wb.Close(ema=ema),
    )
    state = {"model": model.module, "ema": ema, "optimizer": optimizer, "windows": acc}
    if args.resume:
        saved = torch.load(args.save, map_location=device, weights_only=True)
        for name, part in state.items():
            part.load_state_dict(saved[name])
        if scheduler.T_max != updates:
            parser.error(f"{args.save}: a run of {scheduler.T_max} updates, not {updates}")

    for epoch in range(acc.epoch, args.epochs):
        sampler.set_epoch(epoch)
        bar = tqdm(acc.over(loader), total=len(loader), disable=dist.get_rank() > 0)
        for words, tags in bar:
            words, tags = words.to(device), tags.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                loss = F.cross_entropy(model(words).flatten(0, 1), tags.flatten())
            acc.backward(mean=loss, units=(tags != -100).sum())
        accuracy = evaluate(ema.module, texts(500, seed=2), device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {acc.last_step.loss:.3f}, test accuracy {accuracy:.1%}")
            torch.save({name: part.state_dict() for name, part in state.items()}, args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        command = "torchrun --standalone --nproc-per-node 2 examples/train_ddp.py"
        sys.exit(f"run me with torchrun: {command}")
    main()
