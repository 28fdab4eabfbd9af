"""The arithmetic of the batch never loses a sample; the rules give the numbers of their papers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wholebatch.cli.batch_scaling import (
    lr_factor,
    scale_warmup,
    solve,
)
from wholebatch.errors import OptionError

sizes = st.integers(1, 400)
few = st.integers(1, 17)


# ------------------------------------------------------------------ arithmetic


@given(batch_size=sizes, micro_batch=st.integers(1, 60), ranks=few)
def test_every_sample_is_on_one_rank_in_one_micro_batch(
    batch_size: int, micro_batch: int, ranks: int
) -> None:
    batch = solve(batch_size=batch_size, micro_batch=micro_batch, ranks=ranks)
    assert sum(map(sum, batch.micro_batches)) == batch_size
    assert tuple(map(sum, batch.micro_batches)) == batch.shares
    assert len(batch.shares) == ranks
    assert max(batch.shares) - min(batch.shares) <= 1
    assert batch.steps == max(map(len, batch.micro_batches))
    for sizes_of_rank in batch.micro_batches:
        assert all(size == micro_batch for size in sizes_of_rank[:-1])
        assert all(0 < size <= micro_batch for size in sizes_of_rank)
    assert str(batch).endswith(f" = {batch_size}")
    terms = str(batch).rpartition(" = ")[0]
    for word in (" ranks", " rank"):
        terms = terms.replace(word, "")
    assert eval(terms.replace("×", "*")) == batch_size


@given(batch_size=sizes, micro_batch=st.integers(1, 60), steps=few, ranks=few)
def test_what_is_asked_for_is_the_smallest_that_does_it(
    batch_size: int, micro_batch: int, steps: int, ranks: int
) -> None:
    by_steps = solve(batch_size=batch_size, steps=steps, ranks=ranks)
    assert by_steps.steps <= steps
    if by_steps.micro_batch > 1:
        smaller = solve(batch_size=batch_size, micro_batch=by_steps.micro_batch - 1, ranks=ranks)
        assert smaller.steps > steps
    if micro_batch * steps <= batch_size:
        least = -(-batch_size // (micro_batch * steps))
        by_ranks = solve(batch_size=batch_size, micro_batch=micro_batch, ranks=least)
        assert by_ranks.steps <= steps
        if least > 1:
            fewer = solve(batch_size=batch_size, micro_batch=micro_batch, ranks=least - 1)
            assert fewer.steps > steps
        found = solve(batch_size=batch_size, micro_batch=micro_batch, steps=steps)
        assert found == by_ranks
    made = solve(micro_batch=micro_batch, steps=steps, ranks=ranks)
    assert made.batch_size == micro_batch * steps * ranks
    assert {size for sizes_of in made.micro_batches for size in sizes_of} == {micro_batch}
    assert made == solve(
        batch_size=made.batch_size, micro_batch=micro_batch, steps=steps, ranks=ranks
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give two of --batch-size, --micro-batch and --steps"),
        ({"batch_size": 64, "ranks": 2}, "give two of"),
        (
            {"batch_size": 64, "micro_batch": 8, "steps": 4, "ranks": 1},
            "a batch of 64 in micro-batches of 8 on 1 rank takes 8 steps, not 4",
        ),
    ],
)
def test_impossible_arithmetic_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        solve(**options)


# ----------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("base", "batch", "rule", "factor"),
    [
        (256, 8192, "linear", 32),  # Goyal 2017, arXiv:1706.02677: 0.1 to 3.2
        (512, 32768, "sqrt", 8),  # You 2019, arXiv:1904.00962: LAMB for BERT
        (128, 1024, "sqrt", math.sqrt(8)),  # Krizhevsky 2014, arXiv:1404.5997
    ],
)
def test_the_rules_of_the_papers(base: int, batch: int, rule: Any, factor: float) -> None:
    assert lr_factor(base_batch=base, batch=batch, rule=rule) == pytest.approx(factor)


def test_warmup_over_the_same_samples() -> None:
    assert scale_warmup(1000, base_batch=256, batch=512) == 500
    assert scale_warmup(1000, base_batch=256, batch=768) == 334  # never shorter
    assert scale_warmup(0, base_batch=1, batch=2) == 0
    large = 10**17  # more than a float can hold
    assert scale_warmup(3, base_batch=large + 1, batch=large) == 4
