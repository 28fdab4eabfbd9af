"""How near a graph's gradient must be to the truth where eager code in 16 bit is far from it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from wholebatch.compile.graph_check import is_as_near


def tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in (400, 50, 1000)]


TRUTH, NOISE, OTHER = tensors(0), tensors(1), tensors(2)


def mixed(share: float, noise: list[Tensor]) -> list[Tensor]:
    """The truth with an error of this share of its norm."""
    return [a + share * b for a, b in zip(TRUTH, noise, strict=True)]


@pytest.mark.parametrize("share", [0.2, 0.9, 1.5])
def test_another_rounding_of_the_same_size_is_as_near(share: float) -> None:
    assert is_as_near(mixed(share, OTHER), mixed(share, NOISE), TRUTH)


@pytest.mark.parametrize("share", [0.2, 0.9, 1.1])
def test_another_function_is_not(share: float) -> None:
    """Unrelated tensors of the right size are farther than eager code."""
    assert not is_as_near(OTHER, mixed(share, NOISE), TRUTH)


@pytest.mark.parametrize("share", [0.2, 0.9, 1.5])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_gradient_that_is_missing_is_not(share: float, place: int) -> None:
    found = mixed(share, OTHER)
    found[place] = torch.zeros_like(found[place])
    assert not is_as_near(found, mixed(share, NOISE), TRUTH)


def test_a_gradient_that_rounding_has_not_blown_up_is_as_near() -> None:
    """Eager code may be several times too large itself, in one tensor more than in another."""
    wanted = [factor * one for factor, one in zip((6.0, 3.0, 2.0), mixed(1.5, NOISE), strict=True)]
    assert is_as_near(mixed(1.5, OTHER), wanted, TRUTH)
