"""The chosen micro-batch is the largest that fits, and what does not fit is told with a way out."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.memory.models import CASES, GPT, loss, mlp, tokens, vectors
from wholebatch.errors import OptionError
from wholebatch.memory.activation_checkpointing import is_checkpointed
from wholebatch.memory.budget import device_memory, free_memory, parse_memory
from wholebatch.memory.choose_micro_batch import (
    CLOSE_ENOUGH,
    choose_micro_batch,
    largest_fitting,
    resize_batch,
    spare,
)
from wholebatch.memory.make_it_fit import ladder, refusal
from wholebatch.memory.predict import Prediction, predict_peak
from wholebatch.memory.trial_step import Correction, calibrate, measure_step
from wholebatch.readable_sizes import bytes_said

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


# --- budgets ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "memory, expected",
    [
        ("20GiB", 20 * 2**30),
        ("1.5 gib", 3 * 2**29),
        ("512MB", 512_000_000),
        ("64 KiB", 65536),
        ("4096", 4096),
        (4096, 4096),
        ("25%", 250),
        (0.5, 500),
        (1.0, 1000),
        ("0.5", 500),
    ],
)
def test_budgets_as_users_write_them(memory: int | float | str, expected: int) -> None:
    assert parse_memory(memory, total=1000) == expected


@pytest.mark.parametrize(
    "memory", ["", "lots", "20 Gallons", "-1GiB", "0", 0, -5, 0.0, 1.5, True, "1.5"]
)
def test_budgets_that_mean_nothing(memory: int | float | str) -> None:
    with pytest.raises(OptionError, match=r"memory=.*: must be a size such as \"20GiB\""):
        parse_memory(memory, total=1000)


def test_what_is_free_and_what_is_there() -> None:
    assert 0 < free_memory() <= device_memory()
    assert parse_memory("free", held=7) > 7
    assert parse_memory("100%") == device_memory()
    assert bytes_said(1536) == "1.50 KiB"


# --- the search ------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(1, 10**4)), min_size=1, max_size=4
    ),
    budget=st.integers(1, 10**7),
    most=st.integers(1, 3000),
)
def test_finds_the_largest_of_any_bend(
    pieces: list[tuple[int, int]], budget: int, most: int
) -> None:
    tried: dict[int, int] = {}

    def peak(size: int) -> int:
        return max(constant + slope * size for constant, slope in pieces)

    found = largest_fitting(peak, budget=budget, most=most, tried=tried)
    true = max((size for size in range(1, most + 1) if peak(size) <= budget), default=0)
    if true == 0:
        assert found == 1
    else:
        assert peak(found) <= budget
        assert found >= min(true - 1, true * (1 - CLOSE_ENOUGH) - 1)
        assert len(tried) <= 20
    assert all(1 <= size <= most for size in tried)


@pytest.mark.parametrize("name", ["mlp", "gpt", "cnn"])
def test_chooses_at_least_nine_tenths_of_the_largest(name: str) -> None:
    case = CASES[name]
    model = case.make()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = case.batch(4)

    def peak(size: int) -> int:
        micro = resize_batch(batch, size)
        return predict_peak(model, loss, micro, optimizer=optimizer).peak

    budget = int(peak(24) * 1.01)
    choice = choose_micro_batch(model, loss, batch, budget=budget, optimizer=optimizer, most=64)
    assert choice.fits
    assert not choice.is_whole_batch
    assert choice.prediction.peak == peak(choice.micro_batch) <= budget
    # Nothing from a tenth (or two) more on fits, so the largest is no more than that.
    assert peak(max(choice.micro_batch + 2, int(choice.micro_batch / 0.9) + 1)) > budget
    first, second = choice.summary().split("\n")
    assert first.startswith(f"micro-batch {choice.micro_batch}: the largest that fits; ")
    assert second.startswith("predicted peak ")


def test_the_whole_batch_where_it_fits() -> None:
    choice = choose_micro_batch(mlp(), loss, vectors(32), budget=10**9)
    assert (choice.micro_batch, choice.is_whole_batch) == (32, True)
    assert "the whole batch fits" in choice.summary()


def test_says_that_one_sample_does_not_fit() -> None:
    choice = choose_micro_batch(mlp(), loss, vectors(32), budget=1000)
    assert (choice.micro_batch, choice.fits) == (1, False)
    with pytest.raises(OptionError, match="most=0: must be at least 1 sample"):
        choose_micro_batch(mlp(), loss, vectors(4), budget=1000, most=0)


def test_a_correction_makes_the_choice_smaller() -> None:
    model, batch = mlp(), vectors(8)
    budget = predict_peak(model, loss, vectors(512)).peak
    plain = choose_micro_batch(model, loss, batch, budget=budget, most=1024)
    more = Correction(constant=1000, per_sample=500, measured={})
    corrected = choose_micro_batch(model, loss, batch, budget=budget, most=1024, correct=more)
    assert corrected.micro_batch < plain.micro_batch
    without = predict_peak(model, loss, resize_batch(batch, corrected.micro_batch)).peak
    assert corrected.prediction.peak == without + 1000 + 500 * corrected.micro_batch
    assert sum(corrected.prediction.by_category.values()) == corrected.prediction.peak


def test_room_for_one_more_piece_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    prediction = Prediction(peak=1000, by_category={}, seconds=0.0, largest=300)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert spare(prediction, torch.device("cpu")) == 0
    assert spare(prediction, torch.device("cuda")) == 300
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert spare(prediction, torch.device("cuda")) == 40
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    assert spare(replace(prediction, largest=10), torch.device("cuda")) == 40


# --- tokens ----------------------------------------------------------------------------------


def padded(lengths: list[int], width: int) -> dict[str, torch.Tensor]:
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    return {
        "x": torch.randint(0, 96, (len(lengths), width)) * mask,
        "y": torch.where(mask, 1, -100),
        "attention_mask": mask.long(),
    }


# --- what was measured -----------------------------------------------------------------------


def test_on_the_cpu_a_measured_step_is_what_was_predicted() -> None:
    correction = calibrate(CASES["cnn"].make(), loss, CASES["cnn"].batch(4))
    assert correction.measured == {1: 0, 2: 0}
    correction = calibrate(mlp(), loss, vectors(4), samples=(2, 4))
    assert correction.measured == {2: 0, 4: 0}
    assert correction(100, 5000) == 5000


def test_measuring_leaves_nothing_behind() -> None:
    model = CASES["cnn"].make()
    loss(model, CASES["cnn"].batch(2)).total.backward()
    before = [t.clone() for t in (*model.parameters(), *model.buffers())]
    gradients = [p.grad for p in model.parameters()]
    micro = CASES["cnn"].batch(4)
    random = torch.get_rng_state()
    assert measure_step(model, loss, micro) > 0
    after = [*model.parameters(), *model.buffers()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(random, torch.get_rng_state())


# --- the ladder ------------------------------------------------------------------------------


def gpt() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Its activations outweigh its weights, so 16 bits help."""
    model = GPT(layers=4, width=32, vocabulary=16, length=128)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def texts(n: int) -> dict[str, torch.Tensor]:
    return {name: value % 16 for name, value in tokens(n, 128).items()}


def test_the_ladder_says_what_each_rung_gives() -> None:
    model, optimizer = gpt()
    sample = texts(1)
    rungs = ladder(model, loss, sample, budget=1, optimizer=optimizer)
    assert [rung.what for rung in rungs] == [
        "as it is",
        "bf16 autocast",
        "bf16 autocast and checkpointing of 4 blocks",
    ]
    assert not any(rung.fits for rung in rungs)
    assert not any(is_checkpointed(module) for module in model.modules())


def test_the_first_rung_that_fits_applies_no_more_than_is_needed() -> None:
    model, optimizer = gpt()
    sample = texts(1)

    def first(budget: int) -> tuple[str, bool]:
        rungs = ladder(model, loss, sample, budget=budget, optimizer=optimizer)
        rung = next(one for one in rungs if one.fits)
        return rung.precision, rung.checkpoints

    peaks = [one.peak for one in ladder(model, loss, sample, budget=1, optimizer=optimizer)]
    assert first(max(peaks)) == ("full", False)
    assert first(peaks[2]) == ("bf16", True)
    assert not any(is_checkpointed(module) for module in model.modules())


def test_sixteen_bits_that_do_not_help_are_not_applied() -> None:
    """One short sample of a wide model: the copies of the weights are larger than what is saved."""
    model = GPT(layers=4, width=64, vocabulary=16, length=24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sample = {name: value % 16 for name, value in tokens(1).items()}
    rungs = ladder(model, loss, sample, budget=1, optimizer=optimizer)
    as_is, half, again, both = rungs[:4]
    assert half.peak > as_is.peak > again.peak
    assert again.what == "checkpointing of 4 blocks"
    assert both.what == "bf16 autocast and checkpointing of 4 blocks"
    rungs = ladder(model, loss, sample, budget=again.peak, optimizer=optimizer)
    found = next(rung for rung in rungs if rung.fits)
    assert (found.precision, found.checkpoints) == ("full", True)


def test_the_refusal_says_what_would_help_where_nothing_here_does() -> None:
    model, optimizer = gpt()
    said = refusal(ladder(model, loss, texts(1), budget=1000, optimizer=optimizer), 1000)
    assert re.match(
        r"memory=.* one sample needs .*; with bf16 autocast .*, bf16 autocast and "
        r"checkpointing of 4 blocks .*use a smaller model",
        said,
    )
    assert "one sample needs" in refusal(ladder(mlp(), loss, vectors(1), budget=1000), 1000)
