"""Small random models of tokens, in float64: transformers, recurrent ones, Hugging Face's."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.mistakes.kinds import classifier, kind, lengths, mask, tokens
from tests.mistakes.task import Batch, Task


class Encoder(nn.Module):
    """A transformer over padded tokens; logits for every token."""

    def __init__(self, dropout: float, vocabulary: int = 11, *, again: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 8, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout, batch_first=True)
        self.head, self.again = nn.Linear(8, vocabulary), again

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        hidden = self.embed(x)
        if self.again:
            hidden = checkpoint(self.layer, hidden, None, ~keep, use_reentrant=False)
        else:
            hidden = self.layer(hidden, src_key_padding_mask=~keep)
        return self.head(hidden)


def of_tokens(model: nn.Module, samples: int, vocabulary: int = 11, longest: int = 6) -> Task:
    count, keep = lengths(samples, longest)
    x = torch.randint(1, vocabulary, (samples, longest)).masked_fill(~keep, 0)
    batch = {"x": x, "y": x.roll(-1, 1), "mask": keep, "length": count}
    return Task("", model.double(), batch, lambda m, b: m(b["x"], b["mask"]), tokens, mask)


@kind("transformer")
def transformer(draw: random.Random, samples: int) -> Task:
    return of_tokens(Encoder(0.0), samples)


@kind("transformer with dropout")
def transformer_dropout(draw: random.Random, samples: int) -> Task:
    return of_tokens(Encoder(0.2), samples).but(random=True)


@kind("checkpointed")
def checkpointed(draw: random.Random, samples: int) -> Task:
    return of_tokens(Encoder(0.0, again=True), samples)


@kind("checkpointed dropout")
def checkpointed_dropout(draw: random.Random, samples: int) -> Task:
    return of_tokens(Encoder(0.1, again=True), samples).but(random=True)


class Recurrent(nn.Module):
    def __init__(self, cell: str, *, packed: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 5, padding_idx=0)
        self.rnn = getattr(nn, cell)(5, 6, batch_first=True, bidirectional=packed)
        self.head, self.packed = nn.Linear(12 if packed else 6, 9), packed

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        hidden = self.embed(x)
        if self.packed:
            packed = pack_padded_sequence(hidden, count, batch_first=True, enforce_sorted=False)
            hidden, _ = pad_packed_sequence(
                self.rnn(packed)[0], batch_first=True, total_length=x.shape[1]
            )
        else:
            hidden = self.rnn(hidden)[0]
        return self.head(hidden)


@kind("lstm")
def lstm(draw: random.Random, samples: int) -> Task:
    made = of_tokens(Recurrent("LSTM", packed=False), samples, 9)
    return made.but(forward=lambda m, b: m(b["x"], b["length"]))


@kind("packed gru")
def gru(draw: random.Random, samples: int) -> Task:
    made = of_tokens(Recurrent("GRU", packed=True), samples, 9)
    return made.but(forward=lambda m, b: m(b["x"], b["length"]))


class Bag(nn.Module):
    """The mean of the embeddings of a sample's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 6, padding_idx=0), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        count = (x != 0).sum(1, keepdim=True).clamp(min=1)
        return self.head(self.embed(x).sum(1) / count)


@kind("embeddings with padding")
def embeddings(draw: random.Random, samples: int) -> Task:
    _, keep = lengths(samples, 5)
    return classifier(Bag(), torch.randint(1, 10, (samples, 5)).masked_fill(~keep, 0), 3)


class Tied(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        dtype = self.embed.weight.dtype
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=dtype)
        return self.head(self.layer(self.embed(x), src_mask=causal))


@kind("tied language model")
def tied(draw: random.Random, samples: int) -> Task:
    return of_tokens(Tied(), samples, 13)


def small(kind_of_model: str) -> nn.Module:
    """A tiny Hugging Face model without dropout, in float64."""
    import transformers

    shape: dict[str, dict[str, Any]] = {
        "GPT2": {"n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2},
        "Bert": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
        "T5": {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2},
    }
    still = {
        "GPT2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        "Bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
        "T5": ("dropout_rate",),
    }
    head = {"GPT2": "LMHeadModel", "Bert": "ForMaskedLM", "T5": "ForConditionalGeneration"}
    more = {"intermediate_size": 12} if kind_of_model == "Bert" else {}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "decoder_start_token_id": 0}
    config = getattr(transformers, f"{kind_of_model}Config")(
        vocab_size=13,
        **shape[kind_of_model],
        **dict.fromkeys(still[kind_of_model], 0.0),
        **ends,
        **more,
    )
    model: nn.Module = getattr(transformers, kind_of_model + head[kind_of_model])(config)
    return model.double()


def hugging(kind_of_model: str, samples: int) -> Task:
    made = of_tokens(nn.Identity(), samples, 13)
    model = small(kind_of_model)

    def forward(m: nn.Module, b: Batch) -> Tensor:
        ways = {"input_ids": b["x"], "attention_mask": b["mask"].long()}
        if kind_of_model == "T5":
            ways["decoder_input_ids"] = b["y"]
        out: Tensor = m(**ways).logits
        return out

    return made.but(model=model, forward=forward)


@kind("gpt2")
def gpt2(draw: random.Random, samples: int) -> Task:
    return hugging("GPT2", samples)


@kind("bert")
def bert(draw: random.Random, samples: int) -> Task:
    return hugging("Bert", samples)


@kind("t5")
def t5(draw: random.Random, samples: int) -> Task:
    # Its norms and softmax are computed in float32 whatever the parameters are.
    return hugging("T5", samples).but(tolerance=1e-6)
