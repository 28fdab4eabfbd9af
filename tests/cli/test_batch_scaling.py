"""The arithmetic of the batch never loses a sample; the rules give the numbers of their papers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wholebatch as wb
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


@given(batch_size=sizes, micro_batch=st.integers(1, 60))
def test_the_sizes_are_those_of_split(batch_size: int, micro_batch: int) -> None:
    batch = solve(batch_size=batch_size, micro_batch=micro_batch)
    pieces = wb.split(torch.zeros(batch_size, 1), micro_batch)
    assert tuple(len(piece) for piece in pieces) == batch.micro_batches[0]


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
    ("batch", "rate"), [(256, 0.1), (512, 0.2), (1024, 0.4), (4096, 1.6), (8192, 3.2)]
)
def test_goyal_2017_linear(batch: int, rate: float) -> None:
    """arXiv:1706.02677, section 5: 0.1 · kn/256, reached after five epochs of 1,281,167 images."""
    assert 0.1 * lr_factor(base_batch=256, batch=batch, rule="linear") == pytest.approx(rate)
    five = scale_warmup(5, base_batch=1_281_167, batch=batch)  # five batches of an epoch each
    assert (five - 1) * batch < 5 * 1_281_167 <= five * batch
    if batch == 8192:
        assert five == 782


@pytest.mark.parametrize("power", range(7))
def test_you_2019_square_root(power: int) -> None:
    """arXiv:1904.00962, LAMB for BERT: √k from 512 to 32K; 5/(2^(3 − p/2) · 10³) is its table's."""
    rate = 5 / (2**3 * 1000) * lr_factor(base_batch=512, batch=512 * 2**power, rule="sqrt")
    assert rate == pytest.approx(5 / (2 ** (3 - power / 2) * 1000))


def test_krizhevsky_2014_square_root() -> None:
    """arXiv:1404.5997: √k keeps the variance of the update; k = 8 from 128 to 1024."""
    assert lr_factor(base_batch=128, batch=1024, rule="sqrt") == pytest.approx(math.sqrt(8))


def test_warmup_over_the_same_samples() -> None:
    assert scale_warmup(1000, base_batch=256, batch=512) == 500
    assert scale_warmup(1000, base_batch=256, batch=768) == 334  # never shorter
    assert scale_warmup(0, base_batch=1, batch=2) == 0
    large = 10**17  # more than a float can hold
    assert scale_warmup(3, base_batch=large + 1, batch=large) == 4
