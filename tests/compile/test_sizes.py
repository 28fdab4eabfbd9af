"""Sizes that a graph leaves open: which they are, what they may be, and what is made of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.compile.nets import trace_of
from wholebatch.compile.graph_inputs import take_apart
from wholebatch.compile.symbolic_sizes import differing, pattern
from wholebatch.window.precision import choose


def test_what_is_open_and_what_goes_together() -> None:
    def kind(rows: int, length: int, extra: int = 3) -> Any:
        return take_apart(
            {
                "x": torch.zeros(rows, length),
                "mask": torch.zeros(rows, 1, length, length),
                "z": torch.zeros(extra),
            }
        )

    first, second, third = kind(4, 4), kind(4, 6), kind(2, 6)
    assert pattern(first.key) == pattern(second.key) != pattern(take_apart(torch.ones(1)).key)
    rows, lengths = ((0, 0), (1, 0)), ((0, 1), (1, 2), (1, 3))  # (tensor, dimension)
    assert set(differing(second, [first.key])) == {rows, lengths}
    assert set(differing(third, [second.key])) == {rows}
    assert set(differing(kind(1, 6), [first.key])) == {lengths}
    assert differing(second, [second.key]) == ()
    groups = differing(second, [first.key, third.key])
    assert set(groups) == {rows, lengths}

    model = nn.Linear(6, 6)
    precision = choose("full", "cpu")

    def energy(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
        per_row = model(micro["x"])[:, None] * micro["mask"].mean((1, 2))
        return wb.Loss((per_row.sum() + micro["z"].sum()), micro["x"].shape[0])

    sizes = trace_of(model, energy, second.micro, precision, first.key, third.key).sizes
    assert sizes is not None
    assert sizes.admit(kind(7, 6))
    assert not sizes.admit(kind(1, 6))
