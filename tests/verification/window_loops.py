"""One window of a loop, right and wrong, for the models of `verify_loop`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F


def units(micros: Any) -> int:
    """Return the labels that count, of a window."""
    return sum(int((micro["y"] != -100).sum()) for micro in micros)


def _loss(model: Any, micro: Any, reduction: str) -> Tensor:
    logits = model(micro["x"]).flatten(0, -2)
    return F.cross_entropy(logits, micro["y"].flatten(), reduction=reduction)


def mean(model: Any, micro: Any) -> Tensor:
    return _loss(model, micro, "mean")


def total(model: Any, micro: Any) -> Tensor:
    return _loss(model, micro, "sum")


def right(model: Any, optimizer: Any, micros: Any) -> None:
    counted = units(micros)
    for micro in micros:
        (total(model, micro) / counted).backward()
    optimizer.step()
    optimizer.zero_grad()


def not_divided(model: Any, optimizer: Any, micros: Any) -> None:
    for micro in micros:
        mean(model, micro).backward()
    optimizer.step()
    optimizer.zero_grad()


def mean_of_means(model: Any, optimizer: Any, micros: Any) -> None:
    for micro in micros:
        (mean(model, micro) / len(micros)).backward()
    optimizer.step()
    optimizer.zero_grad()


def sums(model: Any, optimizer: Any, micros: Any) -> None:
    for micro in micros:
        total(model, micro).backward()
    optimizer.step()
    optimizer.zero_grad()


def steps_of_four(model: Any, optimizer: Any, micros: Any) -> None:
    """Steps at every fourth micro-batch, so a short window has no step."""
    for place, micro in enumerate(micros, start=1):
        (mean(model, micro) / 4).backward()
        if place % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
