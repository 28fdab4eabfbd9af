"""Small random models of many kinds in float64, each with a batch and a correct loss."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.mistakes.task import Batch, Task

Make = Callable[[random.Random, int], Task]
KINDS: dict[str, Make] = {}
RANDOM = {"transformer with dropout", "checkpointed dropout"}
WITH_BATCHNORM = {"cnn with batchnorm", "mlp with batchnorm"}


def kind(name: str) -> Callable[[Make], Make]:
    def keep(make: Make) -> Make:
        KINDS[name] = make
        return make

    return keep


def task(name: str, seed: int, samples: int | None = None) -> Task:
    """The same model, batch and loss for the same name and seed."""
    torch.manual_seed(seed)
    draw = random.Random(f"{name} {seed}")
    made = KINDS[name](draw, draw.randint(13, 21) if samples is None else samples)
    return made.but(name=name)


def run(model: nn.Module, micro: Batch) -> Any:
    return model(micro["x"])


def classify(out: Tensor, micro: Batch) -> Tensor:
    return F.cross_entropy(out, micro["y"], reduction="none")


def squared(out: Tensor, micro: Batch) -> Tensor:
    return (out - micro["y"]).square().flatten(1).sum(1)


def tokens(out: Tensor, micro: Batch) -> Tensor:
    return F.cross_entropy(out.transpose(1, 2), micro["y"], reduction="none")


def mask(micro: Batch) -> Tensor:
    return micro["mask"].double()


def weight(micro: Batch) -> Tensor:
    return micro["weight"]


def rows(number: int, width: int) -> Tensor:
    return torch.randn(number, width, dtype=torch.float64)


def labelled(x: Tensor, classes: int, **more: Tensor) -> Batch:
    return {"x": x, "y": torch.randint(0, classes, (len(x),)), **more}


def lengths(samples: int, longest: int) -> tuple[Tensor, Tensor]:
    """Numbers of tokens, at least 2, and the mask of them."""
    count = torch.randint(2, longest + 1, (samples,))
    count[0] = longest
    return count, torch.arange(longest)[None] < count[:, None]


def classifier(model: nn.Module, x: Tensor, classes: int) -> Task:
    return Task("", model.double(), labelled(x, classes), run, classify)


@kind("mlp")
def mlp(draw: random.Random, samples: int) -> Task:
    width, classes, depth = draw.randint(3, 7), draw.randint(2, 5), draw.randint(1, 3)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, 9), draw.choice([nn.Tanh(), nn.ReLU(), nn.GELU(), nn.SiLU()])]
        width = 9
    first = layers[0]
    assert isinstance(first, nn.Linear)
    model = nn.Sequential(*layers, nn.Linear(9, classes))
    return classifier(model, rows(samples, first.in_features), classes)


@kind("weighted samples")
def weighted(draw: random.Random, samples: int) -> Task:
    model = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)).double()
    batch = labelled(rows(samples, 5), 3, weight=torch.rand(samples, dtype=torch.float64) + 0.1)
    return Task("", model, batch, run, classify, weight)


@kind("regression")
def regression(draw: random.Random, samples: int) -> Task:
    out = draw.randint(1, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, out)).double()
    batch = {"x": rows(samples, 4), "y": rows(samples, out)}
    return Task("", model, batch, run, squared)


@kind("cnn with groupnorm")
def cnn(draw: random.Random, samples: int) -> Task:
    channels = draw.choice([4, 6])
    model = nn.Sequential(
        *(nn.Conv2d(2, channels, 3, padding=1), nn.GroupNorm(2, channels), nn.ReLU()),
        *(nn.Conv2d(channels, channels, 3), nn.InstanceNorm2d(channels), nn.SiLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 3)),
    )
    return classifier(model, torch.randn(samples, 2, 6, 6).double(), 3)


@kind("cnn with batchnorm")
def cnn_batchnorm(draw: random.Random, samples: int) -> Task:
    model = nn.Sequential(
        *(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(16, 3)),
    )
    return classifier(model, torch.randn(samples, 2, 5, 5).double(), 3)


@kind("mlp with batchnorm")
def mlp_batchnorm(draw: random.Random, samples: int) -> Task:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    return classifier(model, rows(samples, 4), 3)


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
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=torch.float64)
        return self.head(self.layer(self.embed(x), src_mask=causal))


@kind("tied language model")
def tied(draw: random.Random, samples: int) -> Task:
    return of_tokens(Tied(), samples, 13)


class Lora(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(x))


@kind("lora on a frozen base")
def lora(draw: random.Random, samples: int) -> Task:
    model = nn.Sequential(
        *(Lora(nn.Linear(5, 8), draw.randint(1, 3)), nn.Tanh()), Lora(nn.Linear(8, 3), 2)
    )
    return classifier(model, rows(samples, 5), 3)


class Experts(nn.Module):
    """A mixture of experts without a capacity: each sample goes to the best for it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(5, 3)
        self.experts = nn.ModuleList(nn.Linear(5, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        share, choice = self.gate(x).softmax(1).max(1)
        hidden = x.new_zeros(len(x), 8)
        for number, expert in enumerate(self.experts):
            at = (choice == number).nonzero()[:, 0]
            hidden = hidden.index_add(0, at, expert(x[at]) * share[at, None])
        return self.head(torch.tanh(hidden))


@kind("experts without a capacity")
def experts(draw: random.Random, samples: int) -> Task:
    return classifier(Experts(), rows(samples, 5), 3)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(1, 4)
        self.down, self.middle = nn.Conv2d(1, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.up = nn.GroupNorm(2, 4), nn.ConvTranspose2d(4, 4, 2, 2)
        self.out = nn.Conv2d(5, 1, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = F.silu(self.down(x)) + self.time(time[:, None])[:, :, None, None]
        hidden = self.up(F.silu(self.norm(self.middle(hidden))))
        return self.out(torch.cat([x, hidden], 1))


def denoise(model: nn.Module, micro: Batch) -> Tensor:
    time = micro["time"][:, None, None, None]
    return model((1 - time).sqrt() * micro["x"] + time.sqrt() * micro["noise"], micro["time"])


@kind("diffusion")
def diffusion(draw: random.Random, samples: int) -> Task:
    x, noise = torch.randn(2, samples, 1, 6, 6).double()
    batch = {"x": x, "noise": noise, "time": torch.rand(samples).double()}
    return Task(
        *("", UNet().double(), batch, denoise),
        lambda out, b: (out - b["noise"]).square().mean((1, 2, 3)),
        lambda b: 1 / (b["time"] + 0.2),
    )


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 6), nn.Sequential(nn.Linear(3, 8), nn.Tanh())
        self.out = nn.Linear(8, 6)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log = self.encode(x).chunk(2, 1)
        return self.out(self.decode(mean + noise * (log / 2).exp())), mean, log


def elbo(out: Any, micro: Batch) -> Tensor:
    made, mean, log = out
    apart = 0.5 * (mean.square() + log.exp() - 1 - log).sum(1)
    return (made - micro["x"]).square().sum(1) + apart


@kind("vae")
def vae(draw: random.Random, samples: int) -> Task:
    batch = {"x": rows(samples, 6), "noise": rows(samples, 3)}
    return Task("", Vae().double(), batch, lambda m, b: m(b["x"], b["noise"]), elbo)


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.net(a), self.net(b), self.net(c)


@kind("siamese")
def siamese(draw: random.Random, samples: int) -> Task:
    batch = {name: rows(samples, 5) for name in "abc"}
    return Task(
        *("", Siamese().double(), batch, lambda m, b: m(b["a"], b["b"], b["c"])),
        lambda out, b: F.triplet_margin_loss(*out, margin=2.0, reduction="none"),
    )


class Straight(torch.autograd.Function):
    """Rounds forward, and passes gradients straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Straight.apply(torch.tanh(self.first(x))))


@kind("custom function")
def custom(draw: random.Random, samples: int) -> Task:
    return classifier(Quantised(), rows(samples, 5), 3)


class Complex(nn.Module):
    """A linear layer over the Fourier transform of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, dtype=torch.complex128) / 4)
        self.head = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((torch.fft.fft(x) @ self.weight.T).abs())


@kind("complex")
def complex_valued(draw: random.Random, samples: int) -> Task:
    return Task("", Complex(), labelled(rows(samples, 6), 3), run, classify)


@kind("weight norm")
def weight_norm(draw: random.Random, samples: int) -> Task:
    first = parametrizations.weight_norm(nn.Linear(5, 8))
    head = parametrizations.orthogonal(nn.Linear(8, 3))
    return classifier(nn.Sequential(first, nn.Tanh(), head), rows(samples, 5), 3)


@kind("hypernetwork")
def hypernetwork(draw: random.Random, samples: int) -> Task:
    """A network that writes the weights of another one, for each sample."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4 * 2)).double()

    def forward(net: nn.Module, micro: Batch) -> Tensor:
        return torch.einsum("nij,nj->ni", net(micro["task"]).view(-1, 2, 4), micro["x"])

    batch = {"x": rows(samples, 4), "task": rows(samples, 3), "y": rows(samples, 2)}
    return Task("", model, batch, forward, squared)


@kind("graph network")
def graphs(draw: random.Random, samples: int) -> Task:
    """A graph of five nodes in each sample; messages within it."""
    near = torch.rand(samples, 5, 5).double() > 0.5

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.message, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor, near: Tensor) -> Tensor:
            return self.head(torch.relu(near.to(x.dtype) @ self.message(x)).mean(1))

    batch = labelled(torch.randn(samples, 5, 4).double(), 3, near=near)
    return Task("", Graph().double(), batch, lambda m, b: m(b["x"], b["near"]), classify)


@kind("flow")
def flow(draw: random.Random, samples: int) -> Task:
    """An affine coupling layer, trained by likelihood."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)).double()

    def forward(net: nn.Module, micro: Batch) -> tuple[Tensor, Tensor]:
        left, right = micro["x"].chunk(2, 1)
        shift, log = net(left).chunk(2, 1)
        return torch.cat([left, right * torch.tanh(log).exp() + shift], 1), torch.tanh(log)

    def nll(out: Any, micro: Batch) -> Tensor:
        return 0.5 * out[0].square().sum(1) - out[1].sum(1)

    return Task("", model, {"x": rows(samples, 6)}, forward, nll)


@kind("physics")
def physics(draw: random.Random, samples: int) -> Task:
    """A loss on the derivative of the network by its input: a second backward."""
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def forward(net: nn.Module, micro: Batch) -> Tensor:
        x = micro["x"].clone().requires_grad_()
        y = net(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return slope + y - x.cos()

    batch = {"x": rows(samples, 1)}
    return Task("", model, batch, forward, lambda out, b: out.square().sum(1))


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
