"""Keys of many moments at once: each is that of its own, and of moments as they are now."""

from __future__ import annotations

from typing import Any

import torch

from wholebatch.offload.adam_accumulation import KeyCache
from wholebatch.offload.packed_moments import keys_of


def state(size: float, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    torch.manual_seed(int(size))
    first = torch.randn(3, 4, dtype=dtype) * size
    return {
        "exp_avg": first,
        "exp_avg_sq": first.abs().square().to(dtype),
        "step": torch.tensor(size),
    }


def alone(one: dict[str, Any]) -> torch.Tensor:
    first, second = one["exp_avg"], one["exp_avg_sq"]
    if first.is_complex():
        first, second = torch.view_as_real(first), torch.view_as_real(second)
    return keys_of([first], [second], [one["step"]])[0].row


def test_all_are_made_once_and_each_is_its_own() -> None:
    states = {n: state(10.0**n) for n in range(4)}
    states[4] = state(7.0, torch.complex64)
    states[5] = state(7.0, torch.float64)
    asked: list[int] = []

    def everyones() -> dict[int, dict[str, Any]]:
        asked.append(1)
        return states

    ready = KeyCache()
    for number, one in states.items():
        assert torch.equal(ready.key(number, one, everyones).row, alone(one))
    assert len(asked) == 1
    ready.clear()
    ready.key(0, states[0], everyones)
    assert len(asked) == 2


def test_moments_that_have_changed_get_new_keys() -> None:
    states = {n: state(10.0**n) for n in range(2)}
    ready = KeyCache()
    before = ready.key(0, states[0], lambda: states).row
    states[1]["exp_avg"].mul_(64.0)
    assert torch.equal(ready.key(1, states[1], lambda: states).row, alone(states[1]))
    states[0] = {**states[0], "exp_avg_sq": states[0]["exp_avg_sq"] * 64.0}  # as after loading
    after = ready.key(0, states[0], lambda: states).row
    assert torch.equal(after, alone(states[0]))
    assert not torch.equal(after, before)
