"""What sorting by length and packing are worth: real tokens per second of ways to split a batch.

    python benchmarks/tokens.py [--json PATH] [--markdown PATH]

A batch of texts, their lengths spread like those of real text (log-normal), padded to the longest,
trained on by a small causal transformer within the same memory: no micro-batch has more padded
tokens than the others' largest. In the given order a micro-batch holds a fixed number of samples;
trimmed, it is cut to its own longest sample and so holds more of them; sorted, its samples are of
like length; packed, several samples share a row, without padding. All make the same gradient, and
run in turn in one process; each figure is the median over rounds, the splitting itself included.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wholebatch.batch import split, tokens

SAMPLES = 128
MEDIAN, SIGMA = 32, 0.7  # of the lengths in tokens; the standard deviation is that of their log
PLACES = 256  # the longest text that the model can read
FIXED = 4  # samples in a micro-batch of the given order
ROUNDS = 5
VOCABULARY = 512
IGNORE = -100
NEEDED = 1.8  # sorted over given order

Batch = dict[str, Tensor]
WAYS = {
    "given": "given order, fixed number of samples",
    "trimmed": "given order, trimmed to the budget",
    "sorted": "sorted, trimmed to the budget",
    "packed": "packed into rows of the longest sample",
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        samples, length, width = hidden.shape
        qkv = self.qkv(self.norms[0](hidden)).view(samples, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        # Causal, and padded on the right only: a real token never looks at padding.
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None
        )
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        return hidden + torch.as_tensor(self.mlp(self.norms[1](hidden)))


class Transformer(nn.Module):
    def __init__(self, width: int = 96, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(PLACES, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor, places: Tensor | None = None) -> Tensor:
        mask = None
        if places is None:
            places = torch.arange(ids.shape[1], device=ids.device)
        else:  # packed: a token looks at those of its own text only
            text = (places == 0).cumsum(1)
            mask = (text[:, :, None] == text[:, None]).tril()[:, None]
        hidden = self.token(ids) + self.place(places)
        for block in self.blocks:
            hidden = block(hidden, mask)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def texts() -> Batch:
    generator = torch.Generator().manual_seed(0)
    # The quantiles of the distribution, shuffled, not draws from it: one lucky long sample would
    # flatter every ratio.
    quantiles = (torch.arange(SAMPLES, dtype=torch.float64) + 0.5) / SAMPLES
    lengths = (MEDIAN * (SIGMA * torch.special.ndtri(quantiles)).exp()).round().long()
    lengths = lengths[torch.randperm(SAMPLES, generator=generator)]
    longest = int(lengths.max())
    mask = torch.arange(longest) < lengths[:, None]
    ids = torch.randint(1, VOCABULARY, (SAMPLES, longest + 1), generator=generator)
    return {
        "input_ids": ids[:, :-1].where(mask, 0),
        "attention_mask": mask.long(),
        "shift_labels": ids[:, 1:].where(mask, IGNORE),
    }


def train_on(model: nn.Module, micro_batches: list[Batch]) -> None:
    for micro in micro_batches:
        logits = model(micro["input_ids"], micro.get("position_ids"))
        targets = micro["shift_labels"].flatten()
        total = functional.cross_entropy(
            logits.flatten(0, 1), targets, ignore_index=IGNORE, reduction="sum"
        )
        total.backward()


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    """Real tokens per second of each way, their ratios, and how far their gradients differ."""
    torch.manual_seed(0)
    model, batch = Transformer(), texts()
    real = int(batch["attention_mask"].sum())
    longest = batch["input_ids"].shape[1]
    budget = FIXED * longest
    splits: dict[str, Callable[[], list[Batch]]] = {
        "given": lambda: split(batch, FIXED),
        "trimmed": lambda: split(batch, tokens(budget, sort=False)),
        "sorted": lambda: split(batch, tokens(budget)),
        "packed": lambda: split(batch, tokens(budget, pack=longest)),
    }
    seconds: dict[str, list[float]] = {way: [] for way in splits}
    gradients: dict[str, Tensor] = {}
    for turn in range(rounds + 1):
        for way, divide in splits.items():
            model.zero_grad()
            start = time.perf_counter()
            train_on(model, divide())
            if turn:  # the first turn warms up
                seconds[way].append(time.perf_counter() - start)
            else:
                gradients[way] = gradient(model)
    results = {}
    for way, divide in splits.items():
        padded = [micro["input_ids"].numel() for micro in divide()]
        distance = (gradients[way] - gradients["given"]).norm() / gradients["given"].norm()
        results[way] = {
            "micro_batches": len(padded),
            "largest": max(padded),
            "padded": sum(padded),
            "seconds": statistics.median(seconds[way]),
            "real_tokens_per_second": real / statistics.median(seconds[way]),
            "ratio_to_given": _ratio(seconds["given"], seconds[way]),
            "gradient_distance": float(distance),
        }
    return {
        "samples": SAMPLES,
        "real_tokens": real,
        "longest": longest,
        "budget": budget,
        "rounds": rounds,
        "sorted_over_given": _ratio(seconds["given"], seconds["sorted"]),
        "sorted_over_trimmed": _ratio(seconds["trimmed"], seconds["sorted"]),
        "packed_over_sorted": _ratio(seconds["sorted"], seconds["packed"]),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, {platform.system()}",
        "date": time.strftime("%Y-%m-%d"),
        "results": results,
    }


def _ratio(slow: list[float], fast: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def markdown(measured: dict[str, Any]) -> str:
    lines = [
        "# What sorting by length and packing are worth",
        "",
        f"{measured['samples']} texts of {measured['real_tokens']} real tokens, the longest of "
        f"{measured['longest']}, and a small causal transformer; no micro-batch has more than "
        f"{measured['budget']} padded tokens. `python benchmarks/tokens.py`, {measured['date']}, "
        f"CPU ({measured['machine']}, {measured['threads']} thread(s)), torch {measured['torch']}; "
        f"medians over {measured['rounds']} rounds that ran in turn.",
        "",
        "| split | micro-batches | largest, padded | all, padded | real tokens/s | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for way, row in measured["results"].items():
        lines.append(
            f"| {WAYS[way]} | {row['micro_batches']} | {row['largest']} | {row['padded']} | "
            f"{row['real_tokens_per_second']:.0f} | {row['ratio_to_given']:.2f} |"
        )
    furthest = max(row["gradient_distance"] for row in measured["results"].values())
    return "\n".join(
        [
            *lines,
            "",
            f"Sorted over the given order: **{measured['sorted_over_given']:.2f}×**; over the "
            f"given order with trimming: **{measured['sorted_over_trimmed']:.2f}×**; packed over "
            f"sorted: **{measured['packed_over_sorted']:.2f}×**. The gradients differ by "
            f"{furthest:.0e} (relative, float32). On a CPU, padding is all that packing saves; on "
            "a GPU it also makes one shape of many (`benchmarks/gpu_packing.py`).",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    folder = Path(__file__).parents[1] / "docs" / "benchmarks"
    parser.add_argument("--json", type=Path, default=folder / "tokens.json")
    parser.add_argument("--markdown", type=Path, default=folder / "tokens.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine blur the ratios
    measured = measure()
    print(markdown(measured))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(measured, indent=2) + "\n")
    arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
    arguments.markdown.write_text(markdown(measured))
    if measured["sorted_over_given"] < NEEDED:
        raise SystemExit(f"sorted over given: {measured['sorted_over_given']:.2f}, needs {NEEDED}")


if __name__ == "__main__":
    main()
