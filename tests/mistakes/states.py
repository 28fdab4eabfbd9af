"""Modules of a user's own that keep state, or mix the samples of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations


class Wrapped(nn.Module):
    """A model with a module behind its (first) output."""

    def __init__(self, model: nn.Module, behind: nn.Module) -> None:
        super().__init__()
        self.model, self.behind = model, behind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.model(*args, **kwargs)
        if hasattr(out, "logits"):
            out.logits = self.behind(out.logits)
            return out
        return self.behind(out) if isinstance(out, Tensor) else (self.behind(out[0]), *out[1:])


class Centred(nn.Module):
    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros_like(out[0]))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.centre.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return (x - self.centre) * (1 + self.centre)


class Codebook(nn.Module):
    """Vector quantisation whose codes follow what is assigned to them."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, out[0].numel(), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1)
        with torch.no_grad():
            choice = torch.cdist(rows, self.codes.to(rows)).argmin(1)
            for code in choice.unique():
                self.codes[code].lerp_(rows[choice == code].mean(0).to(self.codes), 0.2)
        near = self.codes.to(rows)[choice]
        return (rows + 0.5 * (near - rows.detach())).view_as(x)


class Counter(nn.Module):
    """A warm-up by the number of forwards, kept in Python."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * min(1.0, self.calls / 50)


class Observer(nn.Module):
    """Fake quantisation by the largest number seen so far."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.register_buffer("largest", torch.full((), 0.1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, x.abs().max().to(self.largest)))
        return x / self.largest.to(x.dtype)


class OwnSpectralNorm(nn.Module):
    def __init__(self, out: Tensor) -> None:
        super().__init__()
        size = out.shape[-1]
        self.weight = nn.Parameter(torch.randn(size, size))
        self.register_buffer("u", F.normalize(torch.randn(size), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            v = F.normalize(self.weight.T @ self.u, dim=0)
            self.u.copy_(F.normalize(self.weight @ v, dim=0))
        return x @ (self.weight / (self.u @ self.weight @ v))


class TorchSpectralNorm(nn.Module):
    def __init__(self, out: Tensor) -> None:
        super().__init__()
        size = out.shape[-1]
        self.linear = parametrizations.spectral_norm(nn.Linear(size, size))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class OwnBatchNorm(nn.Module):
    """BatchNorm written anew, as BigGAN has it."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.register_buffer("stored_mean", torch.zeros_like(out[0]))
        self.register_buffer("stored_var", torch.ones_like(out[0]))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean(0), x.var(0, unbiased=False)
        with torch.no_grad():
            self.stored_mean.lerp_(mean, 0.1)
            self.stored_var.lerp_(var, 0.1)
        return (x - mean) / (var + 1e-2).sqrt()


class CarriedState(nn.Module):
    """A hidden state that goes on from one call to the next."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before = torch.zeros_like(x[0]) if self.hidden is None else self.hidden
        self.hidden = (0.5 * before + x.mean(0)).detach()
        return x * (1 + torch.tanh(before))


class FunctionalBatchNorm(nn.Module):
    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.shape = out.shape[1:]

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1)
        return F.batch_norm(rows, None, None, training=True, eps=1e-2).view_as(x)


class SoftmaxOverSamples(nn.Module):
    """A softmax along the wrong dimension."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.share = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.share * x.softmax(0))


class Capacity(nn.Module):
    """Each of two experts takes at most half of the samples that there are."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        score = x.flatten(1).sum(1)
        place = score.argsort().argsort()
        expert = (place >= (len(x) + 1) // 2).long()
        return x * self.scale[expert].view(-1, *[1] * (x.dim() - 1))


class HalvedByStatistic(nn.Module):
    """Drops a part of the signal if all samples together have more of it than five of them."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.bound = 5.5 / len(out) * float(out.abs().square().sum())

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 if float(x.detach().abs().square().sum()) > self.bound else x


class ScaledByStatistic(nn.Module):
    """Makes the signal smaller, the larger the batch is on the whole."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.bound = float(out.mean())

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.5 - torch.sigmoid(x.detach().mean() - self.bound))


class MixedUp(nn.Module):
    """Mixup with the next sample."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.share = 0.3

    def forward(self, x: Tensor) -> Tensor:
        return (1 - self.share) * x + self.share * x.roll(1, 0)


class OnGradient(nn.Module):
    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(self.change)
        return x


def normalise_gradient() -> nn.Module:
    """A backward hook that gives the gradient of an activation the norm 1."""
    return OnGradient(lambda g: g / (g.norm() + 1e-3))


def clamp_gradient(samples: int) -> nn.Module:
    """A backward hook that clamps the gradient of an activation, in terms of the mean loss."""
    return OnGradient(lambda g: g.clamp(-0.1 / samples, 0.1 / samples))
