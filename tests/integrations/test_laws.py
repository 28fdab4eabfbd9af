"""The laws of every adapter over torch, each held in every library."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import wholebatch
from tests.integrations.loops import LOOPS
from tests.support import Whole, adamw, distance, mean, mlp, pieces, samples, sgd
from wholebatch.errors import NonFiniteError

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
libraries = pytest.mark.parametrize("library", LOOPS)
SIZES = [3, 4, 2, 5, 2, 5]  # two windows of three


def with_a_nan() -> list[dict[str, Tensor]]:
    """Three windows, the second of which has a NaN in its second micro-batch."""
    micros = pieces(samples(24), [4, 3, 1, 2, 4, 2, 3, 4, 1])
    micros[4] = {**micros[4], "x": micros[4]["x"] * torch.nan}
    return micros


@libraries
def test_what_is_not_finite_is_skipped_as_the_message_advises(library: str) -> None:
    model = mlp()
    with pytest.raises(NonFiniteError) as raised:
        LOOPS[library](model, adamw(model), with_a_nan(), 3)
    advised = re.search(r"pass (\w+)=(wb\.Close\(.*?\))", str(raised.value))
    assert advised is not None
    model = mlp()
    options = {advised[1]: eval(advised[2], {"wb": wholebatch})}
    LOOPS[library](model, adamw(model), with_a_nan(), 3, **options)
    whole = Whole(mlp(), adamw)
    first, _, third = pieces(samples(24), [8, 8, 8])
    whole.step(first)
    whole.step(third)
    whole.assert_same(model)


@libraries
def test_16_bit_gradients_are_added_in_fp32(library: str) -> None:
    """128 micro-batches: the sums of bf16 alone are far off."""
    model = mlp(dtype=torch.bfloat16)
    seen: list[Tensor] = []
    optimizer = sgd(model)
    optimizer.register_step_post_hook(
        lambda *_: seen.extend(p.grad.detach().double().clone() for p in model.parameters())  # type: ignore[union-attr]
    )
    micros = pieces(samples(256, dtype=torch.bfloat16), [2] * 128)
    LOOPS[library](model, optimizer, micros, 128, audit=False)
    other = mlp(dtype=torch.bfloat16)
    parameters = list(other.parameters())
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    for micro in micros:
        parts = torch.autograd.grad(mean(other, micro), parameters)
        for total, part in zip(sums, parts, strict=True):
            total += part.double() / 128
    rounded = [one.to(torch.bfloat16) for one in sums]
    assert distance(seen, sums) <= 1.01 * distance(rounded, sums)
