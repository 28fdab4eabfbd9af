"""What the arithmetic, the rules and the schedules refuse, and numbers beyond a float."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from wholebatch.errors import OptionError
from wholebatch.tune.batch_scaling import (
    adam_betas,
    epochs_in_updates,
    half_life,
    lr_factor,
    scale_warmup,
    solve,
)


def test_numbers_that_fill_the_memory_are_refused() -> None:
    for one in ({"global_batch": 10**12}, {"steps": 10**11}):
        with pytest.raises(OptionError, match="micro-batches; at most 10,000,000"):
            solve(micro_batch=8, **one)
    with pytest.raises(OptionError, match="micro-batches; at most 10,000,000"):
        solve(global_batch=10**13, steps=10**10)
    with pytest.raises(OptionError, match="ranks=100000000: at most 1,000,000"):
        solve(global_batch=64, micro_batch=8, ranks=10**8)
    with pytest.raises(OptionError, match="global_batch=1000000000000000000000: at most"):
        solve(global_batch=10**21, micro_batch=10**17)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: scale_warmup(float("inf"), base_batch=1, batch=2), "updates=inf: must be"),
        (lambda: adam_betas((0.9,), base_batch=1, batch=2), "must be two numbers"),  # type: ignore[arg-type]
        (lambda: half_life(0.9, tokens=-1), "tokens=-1: must be a number above 0"),
        (lambda: lr_factor(base_batch=1, batch=10**400, rule="sqrt"), "must be a number above 0"),
    ],
)
def test_what_has_no_meaning_is_refused(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ask()


def test_rounding_up_is_exact_beyond_a_float() -> None:
    large = 10**17
    assert scale_warmup(3, base_batch=large + 1, batch=large) == 4
    assert epochs_in_updates(3, samples=large + 1, batch=3) == large + 1
