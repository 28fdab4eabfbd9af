"""Right windows with unusual losses and loops, for a watch: none may be called wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.verification.loops.mistakes import units


def _parts(micros: Any) -> list[tuple[Tensor, Tensor, float]]:
    """Return inputs, labels and the share of every micro-batch."""
    total = units(micros)
    return [(m["x"], m["y"], len(m["y"]) / total) for m in micros]


def _onehot(y: Tensor) -> Tensor:
    return F.one_hot(y, 5).float()


def weight_of_its_own(model: Any, optimizer: Any, micros: Any) -> None:
    for x, y, share in _parts(micros):
        (0.5 * F.mse_loss(model(x), _onehot(y)) * share).backward()
    optimizer.step()
    optimizer.zero_grad()


def mean_of_two_losses(model: Any, optimizer: Any, micros: Any) -> None:
    for x, y, share in _parts(micros):
        out = model(x)
        both = torch.stack([F.cross_entropy(out, y), F.l1_loss(out, _onehot(y))]).mean()
        (both * share).backward()
    optimizer.step()
    optimizer.zero_grad()


def three_losses(model: Any, optimizer: Any, micros: Any) -> None:
    for x, y, share in _parts(micros):
        out = model(x)
        losses = [F.cross_entropy(out, y), F.huber_loss(out, _onehot(y)), out.square().mean()]
        (sum(losses) / 3 * share).backward()
    optimizer.step()
    optimizer.zero_grad()


def label_smoothing(model: Any, optimizer: Any, micros: Any) -> None:
    for x, y, share in _parts(micros):
        (F.cross_entropy(model(x), y, label_smoothing=0.1) * share).backward()
    optimizer.step()
    optimizer.zero_grad()


def with_a_regulariser(model: Any, optimizer: Any, micros: Any) -> None:
    for x, y, share in _parts(micros):
        penalty = sum(p.square().sum() for p in model.parameters())
        ((F.cross_entropy(model(x), y) + 1e-3 * penalty) * share).backward()
    optimizer.step()
    optimizer.zero_grad()


def masked_sums(model: Any, optimizer: Any, micros: Any) -> None:
    masks = [(torch.arange(len(m["y"])) % 3 > 0).float() for m in micros]
    total = sum(float(mask.sum()) for mask in masks)
    for micro, mask in zip(micros, masks, strict=True):
        losses = F.cross_entropy(model(micro["x"]), micro["y"], reduction="none")
        ((losses * mask).sum() / total).backward()
    optimizer.step()
    optimizer.zero_grad()


def masked_by_an_index(model: Any, optimizer: Any, micros: Any) -> None:
    masks = [torch.arange(len(m["y"])) % 3 > 0 for m in micros]
    total = sum(int(mask.sum()) for mask in masks)
    for micro, mask in zip(micros, masks, strict=True):
        losses = F.cross_entropy(model(micro["x"]), micro["y"], reduction="none")
        (losses[mask].sum() / total).backward()
    optimizer.step()
    optimizer.zero_grad()


def divergence(model: Any, optimizer: Any, micros: Any) -> None:
    for x, y, share in _parts(micros):
        found = F.log_softmax(model(x), -1)
        (F.kl_div(found, _onehot(y) * 0.9 + 0.02, reduction="batchmean") * share).backward()
    optimizer.step()
    optimizer.zero_grad()


def binary_labels(model: Any, optimizer: Any, micros: Any) -> None:
    for x, y, share in _parts(micros):
        (F.binary_cross_entropy_with_logits(model(x), _onehot(y)) * share).backward()
    optimizer.step()
    optimizer.zero_grad()


def two_backwards_of_a_forward(model: Any, optimizer: Any, micros: Any) -> None:
    for x, y, share in _parts(micros):
        out = model(x)
        (F.cross_entropy(out, y) * share).backward(retain_graph=True)
        (0.1 * F.mse_loss(out, _onehot(y)) * share).backward()
    optimizer.step()
    optimizer.zero_grad()


def scaled_by_hand(model: Any, optimizer: Any, micros: Any) -> None:
    for x, y, share in _parts(micros):
        (F.cross_entropy(model(x), y) * share * 4096).backward()
    for parameter in model.parameters():
        parameter.grad /= 4096
    optimizer.step()
    optimizer.zero_grad()


def seeded_by_a_vector(model: Any, optimizer: Any, micros: Any) -> None:
    total = units(micros)
    for x, y, _ in _parts(micros):
        losses = F.cross_entropy(model(x), y, reduction="none")
        losses.backward(torch.full_like(losses, 1 / total))
    optimizer.step()
    optimizer.zero_grad()


def means_of_samples(model: Any, optimizer: Any, micros: Any) -> None:
    total = units(micros)
    for x, y, _ in _parts(micros):
        (((model(x) - _onehot(y)) ** 2).mean(1).sum() / total).backward()
    optimizer.step()
    optimizer.zero_grad()


def two_optimizers(model: Any, optimizer: Any, micros: Any) -> None:
    first, *rest = list(model.parameters())
    both = torch.optim.SGD([first], lr=0.1), torch.optim.AdamW(rest, lr=1e-3)
    for x, y, share in _parts(micros):
        (F.cross_entropy(model(x), y) * share).backward()
    for one in both:
        one.step()
    model.zero_grad()


def evaluated_between(model: Any, optimizer: Any, micros: Any) -> None:
    for x, y, share in _parts(micros):
        with torch.no_grad():
            model(x)
        (F.cross_entropy(model(x), y) * share).backward()
        model(x)  # a forward whose result nobody uses
    optimizer.step()
    optimizer.zero_grad()


def with_dropout(model: Any, optimizer: Any, micros: Any) -> None:
    for x, y, share in _parts(micros):
        (F.cross_entropy(F.dropout(model(x), 0.3), y) * share).backward()
    optimizer.step()
    optimizer.zero_grad()


def gradient_penalty(model: Any, optimizer: Any, micros: Any) -> None:
    for x, y, share in _parts(micros):
        given = x.clone().requires_grad_()
        out = model(given)
        slope = torch.autograd.grad(out.sum(), given, create_graph=True)[0]
        loss = F.cross_entropy(out, y) + 0.1 * slope.square().sum(1).mean()
        (loss * share).backward()
    optimizer.step()
    optimizer.zero_grad()


UNUSUAL = [
    weight_of_its_own,
    mean_of_two_losses,
    three_losses,
    label_smoothing,
    with_a_regulariser,
    masked_sums,
    masked_by_an_index,
    divergence,
    binary_labels,
    two_backwards_of_a_forward,
    scaled_by_hand,
    seeded_by_a_vector,
    means_of_samples,
    two_optimizers,
    evaluated_between,
    with_dropout,
    gradient_penalty,
]


# ---------------------------------------------------------------- a batch is more than its samples


def root_of_a_mean(model: Any, optimizer: Any, micros: Any) -> None:
    for x, y, share in _parts(micros):
        (F.mse_loss(model(x), _onehot(y)).sqrt() * share).backward()
    optimizer.step()
    optimizer.zero_grad()


def contrastive(model: Any, optimizer: Any, micros: Any) -> None:
    for x, _, share in _parts(micros):
        z = F.normalize(model(x), dim=1)
        (F.cross_entropy(z @ z.T * 5, torch.arange(len(x))) * share).backward()
    optimizer.step()
    optimizer.zero_grad()


COUPLED = {root_of_a_mean: "coupled", contrastive: "not judged"}


def batchnorm_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))
