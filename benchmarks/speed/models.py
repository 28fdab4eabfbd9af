"""The models that are timed in trainers, with data for them.

Every model takes its batch by name and returns an output with its loss, the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import wholebatch as wb

__all__ = ["CASES", "DEVICE", "Case", "Micro"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU serves to try the program itself

Sample = dict[str, Tensor]
Micro = dict[str, Tensor]


class Samples(Dataset[Sample]):
    """A fixed number of samples, made once and drawn again and again."""

    def __init__(self, make: Callable[[int], Sample], number: int) -> None:
        self._made = [make(index) for index in range(number)]

    def __len__(self) -> int:
        return 10_000 * len(self._made)

    def __getitem__(self, index: int) -> Sample:
        return self._made[index % len(self._made)]


def counted(batch: Micro) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def of_transformers(model: Any, batch: Micro) -> wb.Loss:
    """Return the loss of a model of Transformers as wholebatch takes it."""
    return wb.mean_loss(model(**batch).loss, counted(batch))


@dataclass(frozen=True)
class Case:
    """One model, and the batch that an update is made from; gradients are clipped to norm 1."""

    build: Callable[[], nn.Module]
    sample: Callable[[int], Sample]
    window: int

    def samples(self) -> Samples:
        return Samples(self.sample, self.window)


def transformer_of(kind: str, sizes: dict[str, Any], window: int, length: int = 1024) -> Case:
    """Return a language model of Transformers on sequences of one length."""

    def build() -> Any:
        import transformers

        config = getattr(transformers, f"{kind}Config")(use_cache=False, **sizes)
        return getattr(transformers, f"{kind}ForCausalLM")(config)

    def sample(index: int) -> Sample:
        generator = torch.Generator().manual_seed(index)
        row = torch.randint(1, sizes["vocab_size"], (length,), generator=generator)
        return {"input_ids": row, "labels": row}

    return Case(build, sample, window)


def llama_of(width: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 32_000,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **more,
    }


CASES: dict[str, Case] = {
    "llama": transformer_of("Llama", llama_of(768, 2048, 12, 12), 64),
    "llama-1b": transformer_of("Llama", llama_of(2048, 5632, 22, 32), 32),
    "tiny": transformer_of("Llama", llama_of(32, 64, 2, 2, vocab_size=64), 8, length=16),
}
