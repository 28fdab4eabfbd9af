"""The models that are timed, with data for them: GPTs, a ResNet-50, an encoder, a Llama family.

Every model takes its batch by name and returns an output with its loss, the mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, default_collate

import wholebatch as wb

__all__ = ["CASES", "DEVICE", "GPT", "Case", "Micro", "gpt_of", "summed"]

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

    def __init__(self, make: Callable[[int], Sample], number: int) -> None:
        self._made = [make(index) for index in range(number)]

    def __len__(self) -> int:
        return 10_000 * len(self._made)

    def __getitem__(self, index: int) -> Sample:
        return self._made[index % len(self._made)]


class Output(NamedTuple):
    """What a model returns."""

    loss: Tensor


class WithLoss(nn.Module):
    """A model that returns its mean loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Output:
        logits = self.model(x)
        return Output(functional.cross_entropy(logits.flatten(0, -2).float(), y.flatten()))


def summed(model: Any, micro: Micro) -> wb.Loss:
    """Return the loss of a model of ours as wholebatch takes it."""
    return wb.cross_entropy(model.model(micro["x"]), micro["y"])


def counted(batch: Micro) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def of_transformers(model: Any, batch: Micro) -> wb.Loss:
    """Return the loss of a model of Transformers as wholebatch takes it."""
    return wb.mean_loss(model(**batch).loss, counted(batch))


@dataclass(frozen=True)
class Case:
    """One model, and the batch that an update is made from."""

    build: Callable[[], nn.Module]
    sample: Callable[[int], Sample]
    window: int
    loss: Callable[[Any, Micro], wb.Loss] = summed
    units: Callable[[Micro], Tensor] = counted
    clip_norm: float | None = None
    windows: int = 1
    """How many different windows there are; more where lengths differ from window to window."""
    collate: Callable[[list[Sample]], Micro] = default_collate
    longest: int = 0
    """Tokens of the longest sample, where samples are padded to the longest of a micro-batch."""

    def split(self, micro: int) -> Any:
        """Return the micro-batches of wholebatch: by samples, or by as many padded tokens."""
        if not self.longest:
            return micro
        return wb.tokens(micro * self.longest, mask="x", multiple=64)

    def samples(self) -> Samples:
        return Samples(self.sample, self.window * self.windows)


def gpt_of(layers: int, width: int, heads: int, vocabulary: int, length: int, window: int) -> Case:
    return Case(
        build=lambda: WithLoss(GPT(layers, width, heads, vocabulary, length)),
        sample=lambda index: _tokens(index, length, vocabulary),
        window=window,
    )


def transformer_of(kind: str, sizes: dict[str, Any], window: int, length: int = 1024) -> Case:
    """Return a language model of Transformers on sequences of one length, clipped by norm."""

    def build() -> Any:
        import transformers

        config = getattr(transformers, f"{kind}Config")(use_cache=False, **sizes)
        return getattr(transformers, f"{kind}ForCausalLM")(config)

    def sample(index: int) -> Sample:
        row = _tokens(index, length, sizes["vocab_size"])["x"]
        return {"input_ids": row, "labels": row}

    return Case(build, sample, window, of_transformers, clip_norm=1.0)


def llama_of(width: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 32_000,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **more,
    }


def _with_lora() -> Any:
    """Return the large Llama with LoRA of rank 16 on every projection of attention (PEFT)."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    large = CASES["llama-1b"].build()
    return get_peft_model(large, LoraConfig(r=16, target_modules=targets))


_LARGE = llama_of(2048, 5632, 22, 32)
_QWEN2 = llama_of(896, 4864, 24, 14, num_key_value_heads=2, tie_word_embeddings=True)
CASES: dict[str, Case] = {
    "gpt-124m": gpt_of(12, 768, 12, 50304, 1024, window=64),
    "gpt-1.3b": gpt_of(24, 2048, 16, 50304, 1024, window=32),
    "gpt-tiny": gpt_of(2, 64, 2, 512, 64, window=8),
    "resnet-50": Case(build=lambda: WithLoss(_resnet()), sample=_image, window=128),
    "encoder": Case(
        build=lambda: WithLoss(Encoder(12, 768, 12, 30522, 512)),
        sample=lambda index: _masked(index, 512, 30522),
        window=128,
        windows=8,
        collate=_trimmed,
        longest=512,
    ),
    "llama": transformer_of("Llama", llama_of(768, 2048, 12, 12), 64),
    "llama-1b": transformer_of("Llama", _LARGE, 32),
    "lora": dataclasses.replace(transformer_of("Llama", _LARGE, 32), build=_with_lora),
    "qwen2": transformer_of("Qwen2", _QWEN2 | {"vocab_size": 151_936}, 32),
    "tiny": transformer_of("Llama", llama_of(32, 64, 2, 2, vocab_size=64), 8, length=16),
}
