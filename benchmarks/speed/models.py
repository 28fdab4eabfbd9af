"""The models that are timed, with data for them: two GPTs, a ResNet-50 and an encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, default_collate

import wholebatch as wb

__all__ = ["CASES", "DEVICE", "Case", "Micro", "Samples", "mean", "summed"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU serves to try the program itself

Sample = dict[str, Tensor]
Micro = dict[str, Tensor]


class Block(nn.Module):
    """Attention and a perceptron, each on normalised input and added to it."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).split(width, dim=2)
        q, k, v = (
            t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for t in (q, k, v)
        )
        mixed = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=keep, is_causal=self.causal
        )
        x = x + self.mix(mixed.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return x + added


class GPT(nn.Module):
    """A decoder with learnt positions and an output layer of its own."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_small)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.place(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Encoder(nn.Module):
    """A BERT-like encoder over padded sequences, with a prediction for every token."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width, padding_idx=0)
        self.place = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.apply(_small)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        keep = (tokens != 0)[:, None, None, :]
        x = self.token(tokens) + self.place(places)
        for block in self.blocks:
            x = block(x, keep)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _small(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def _resnet() -> nn.Module:
    """ResNet-50 with GroupNorm, so that every loop trains the same model."""
    import torchvision  # type: ignore[import-not-found, unused-ignore]

    model: nn.Module = torchvision.models.resnet50(
        norm_layer=lambda channels: nn.GroupNorm(32, channels)
    )
    return model


def _tokens(index: int, length: int, vocabulary: int) -> Sample:
    generator = torch.Generator().manual_seed(index)
    text = torch.randint(1, vocabulary, (length + 1,), generator=generator)
    return {"x": text[:-1], "y": text[1:]}


def _masked(index: int, longest: int, vocabulary: int) -> Sample:
    """A text of its own length, padded with 0; `_trimmed` cuts a batch to its longest one."""
    generator = torch.Generator().manual_seed(index)
    length = int(torch.randint(longest // 8, longest + 1, (), generator=generator))
    text = torch.randint(1, vocabulary, (longest,), generator=generator)
    text[length:] = 0
    labels = torch.where(torch.rand(longest, generator=generator) < 0.15, text, -100)
    labels[length:] = -100
    return {"x": text, "y": labels}


def _trimmed(samples: list[Sample], multiple: int = 64) -> Micro:
    batch: Micro = default_collate(samples)
    longest = int((batch["x"] != 0).sum(1).max())
    width = min(-(-longest // multiple) * multiple, batch["x"].shape[1])
    return {name: leaf[:, :width].contiguous() for name, leaf in batch.items()}


def _image(index: int) -> Sample:
    generator = torch.Generator().manual_seed(index)
    return {
        "x": torch.randn(3, 224, 224, generator=generator),
        "y": torch.randint(0, 1000, (), generator=generator),
    }


class Samples(Dataset[Sample]):
    """A fixed number of samples, made once and drawn again and again."""

    def __init__(self, make: Callable[[int], Sample], number: int, repeat: int = 10_000) -> None:
        self._made = [make(index) for index in range(number)]
        self._length = number * repeat

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        return self._made[index % len(self._made)]


@dataclass(frozen=True)
class Case:
    """One model, the batch that an update is made from, and what a unit of it costs."""

    build: Callable[[], nn.Module]
    sample: Callable[[int], Sample]
    window: int
    units: str
    units_per_sample: float
    flops_per_unit: float
    """Forward and backward, of the matrix products and convolutions; 0 where not counted."""
    windows: int = 1
    """How many different windows there are; more where lengths differ from window to window."""
    collate: Callable[[list[Sample]], Micro] = default_collate
    longest: int = 0
    """Tokens of the longest sample, where samples are padded to the longest of a micro-batch."""

    def split(self, micro: int) -> Any:
        """The micro-batches of wholebatch: by samples, or by as many padded tokens."""
        if not self.longest:
            return micro
        return wb.tokens(micro * self.longest, mask="x", multiple=64)

    def samples(self) -> Samples:
        return Samples(self.sample, self.window * self.windows)


def summed(model: Any, micro: Micro) -> wb.Loss:
    """The loss as wholebatch takes it."""
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def mean(model: Any, micro: Micro) -> Tensor:
    """The loss as everybody else takes it."""
    logits = model(micro["x"])
    return functional.cross_entropy(logits.flatten(0, -2).float(), micro["y"].flatten())


def _gpt(layers: int, width: int, heads: int, window: int) -> Case:
    vocabulary, length = 50304, 1024
    parameters = 12 * layers * width**2 + vocabulary * width
    attention = 6 * layers * width * length  # causal: half of 12 · layers · width · length
    return Case(
        build=lambda: GPT(layers, width, heads, vocabulary, length),
        sample=lambda index: _tokens(index, length, vocabulary),
        window=window,
        units="tokens",
        units_per_sample=length,
        flops_per_unit=6.0 * parameters + attention,
    )


CASES: dict[str, Case] = {
    "gpt-124m": _gpt(12, 768, 12, window=64),
    "gpt-1.3b": _gpt(24, 2048, 16, window=32),
    "gpt-cpu": Case(
        build=lambda: GPT(2, 128, 4, 1024, 128),
        sample=lambda index: _tokens(index, 128, 1024),
        window=16,
        units="tokens",
        units_per_sample=128,
        flops_per_unit=6.0 * (12 * 2 * 128**2 + 1024 * 128),
    ),
    "gpt-tiny": Case(
        build=lambda: GPT(2, 64, 2, 512, 64),
        sample=lambda index: _tokens(index, 64, 512),
        window=8,
        units="tokens",
        units_per_sample=64,
        flops_per_unit=6.0 * (12 * 2 * 64**2 + 512 * 64),
    ),
    "resnet-50": Case(
        build=_resnet,
        sample=_image,
        window=128,
        units="images",
        units_per_sample=1,
        flops_per_unit=3 * 2 * 4.09e9,
    ),
    "encoder": Case(
        build=lambda: Encoder(12, 768, 12, 30522, 512),
        sample=lambda index: _masked(index, 512, 30522),
        window=128,
        units="sequences",
        units_per_sample=1,
        flops_per_unit=0.0,
        windows=8,
        collate=_trimmed,
        longest=512,
    ),
}
