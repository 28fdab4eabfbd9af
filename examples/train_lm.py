"""Train a small GPT on the docstrings of torch: documents of very different lengths.

    python examples/train_lm.py            # with --resume: after a stop, from the last checkpoint

`wb.WholeBatch` splits each batch, and makes its exact update: a mean over all of its tokens.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from tqdm import tqdm

import wholebatch as wb

LENGTH = 128  # tokens of the longest text


class Block(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        layers = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.feed = nn.Sequential(nn.LayerNorm(width), *layers)

    def forward(self, x):
        split = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        mixed = F.scaled_dot_product_attention(*split.unbind(2), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.feed(x)


class GPT(nn.Module):
    def __init__(self, width=64, layers=2):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, tokens):
        return self.head(self.blocks(self.tokens(tokens) + self.places.weight[: tokens.shape[1]]))


def documents():
    """Return the docstrings of torch's tensor methods as bytes, cut to `LENGTH`."""
    texts = [str(getattr(torch.Tensor, name).__doc__ or "") for name in sorted(dir(torch.Tensor))]
    texts = [text.strip().encode()[: LENGTH + 1] for text in texts if len(text.strip()) > 1]
    return [torch.tensor(list(text)) for text in texts]


def collate(batch):
    """Pad to the longest text. Label -100 does not count."""
    inputs = pad_sequence([text[:-1] for text in batch], batch_first=True)
    labels = pad_sequence([text[1:] for text in batch], batch_first=True, padding_value=-100)
    return {"inputs": inputs, "labels": labels}


def loss(model, micro):
    return wb.cross_entropy(model(micro["inputs"]), micro["labels"])  # a sum, and its tokens


@torch.no_grad()
def evaluate(model, loader, device):
    """Return the mean loss over all tokens: sums, divided once."""
    losses = [loss(model, {k: v.to(device) for k, v in batch.items()}) for batch in loader]
    return float(sum(part.total for part in losses) / sum(part.units for part in losses))


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="texts per update")
    parser.add_argument("--micro-batch", type=int, default=8, help="texts in memory at a time")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--precision", choices=["full", "bf16", "fp16"], default="full")
    parser.add_argument("--save", type=Path, default=Path("lm.pt"))
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    texts, order = documents(), torch.Generator()
    train_texts = [text for i, text in enumerate(texts) if i % 10]  # the others are for the test
    loader = DataLoader(train_texts, args.batch_size, True, generator=order, collate_fn=collate)
    test_loader = DataLoader(texts[::10], args.batch_size, collate_fn=collate)
    model = GPT().to(device)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    updates = args.epochs * len(loader)  # one per batch
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=updates)
    train = wb.WholeBatch(
        model, optimizer, loss=loss, micro_batch=args.micro_batch, precision=args.precision,
        clip_norm=1.0, scheduler=scheduler, close=wb.Close(ema=ema),
    )  # fmt: skip
    state = {"model": model, "ema": ema, "optimizer": optimizer, "windows": train}
    if args.resume:
        saved = torch.load(args.save, map_location=device, weights_only=True)
        for name, part in state.items():
            part.load_state_dict(saved[name])
        if scheduler.total_steps != updates:
            parser.error(f"{args.save}: a run of {scheduler.total_steps} updates, not {updates}")

    for epoch in range((train.updates + train.skipped) // len(loader), args.epochs):
        order.manual_seed(epoch)  # a resumed run sees the same order
        bar = tqdm(loader, desc=f"epoch {epoch + 1}")
        for batch in bar:
            step = train.step(batch)
            bar.set_postfix(loss=f"{step.loss:.3f}", tokens=int(step.units))
        print(f"epoch {epoch + 1}: test loss {evaluate(ema.module, test_loader, device):.3f}")
        torch.save({name: part.state_dict() for name, part in state.items()}, args.save)


if __name__ == "__main__":
    main()
