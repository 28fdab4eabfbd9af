"""How near a graph must be to eager code, and what counts where rounding in 16 bit is large."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from wholebatch.compile.execute_mode import CannotTrace
from wholebatch.compile.graph_check import differs, hold_against


def tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in (400, 50, 1000)]


EAGER, NOISE, OTHER = tensors(0), tensors(1), tensors(2)


def mixed(share: float) -> list[Tensor]:
    """The gradients of eager code with an error of this share of their norm."""
    return [a + share * b for a, b in zip(EAGER, NOISE, strict=True)]


def is_refused(found: list[Tensor], what: str, *, compiled: bool, sixteen_bit: bool = True) -> bool:
    try:
        hold_against(found, EAGER, what, sixteen_bit=sixteen_bit, compiled=compiled)
    except CannotTrace:
        return True
    return False


def test_a_loss_in_16_bit_is_held_to_2_percent_as_traced_and_to_a_tenth_compiled() -> None:
    for share, traced, compiled in ((0.01, False, False), (0.05, True, False), (0.2, True, True)):
        assert is_refused(mixed(share), "loss", compiled=False) is traced
        assert is_refused(mixed(share), "loss", compiled=True) is compiled


@pytest.mark.parametrize("compiled", [False, True])
def test_in_full_precision_the_size_of_gradients_excuses_nothing(compiled: bool) -> None:
    assert is_refused(mixed(0.05), "gradient", compiled=compiled, sixteen_bit=False)
    assert not is_refused(mixed(0.005), "gradient", compiled=compiled, sixteen_bit=False)
    wide = [one.double() for one in EAGER]
    near = [one * (1 + 1e-5) for one in wide]
    assert differs(near, wide, "gradient", sixteen_bit=False, compiled=compiled) is not None


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_rounding_that_a_deep_model_amplifies_is_admitted(share: float) -> None:
    assert not is_refused(mixed(share), "gradient", compiled=True)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("factor", [0.0, 0.4, 3.0, float("nan")])
def test_a_gradient_of_another_size_is_refused(place: int, factor: float) -> None:
    found = mixed(0.2)
    found[place] = found[place] * factor
    assert is_refused(found, "gradient", compiled=True)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_gradient_of_another_direction_is_refused(place: int) -> None:
    found = mixed(0.2)
    found[place] = -found[place]
    assert is_refused(found, "gradient", compiled=True)
    found[place] = found[place].flip(0)
    assert is_refused(found, "gradient", compiled=True)
