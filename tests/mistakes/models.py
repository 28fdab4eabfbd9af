"""Small random models of many kinds in float64, each with a batch and a correct loss."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.mistakes.kinds import classifier, classify, kind, labelled, rows, run, squared, weight
from tests.mistakes.task import Batch, Task


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
