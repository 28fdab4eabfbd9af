"""The chosen micro-batch is the largest that fits, and what does not fit is told with a way out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wholebatch as wb
from tests.memory.models import loss, mlp, vectors
from wholebatch.errors import OptionError
from wholebatch.memory.budget import device_memory, free_memory, parse_memory
from wholebatch.memory.choose_micro_batch import choose_micro_batch
from wholebatch.memory.predict import Prediction
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
def test_budgets_as_users_write_them(
    memory: int | float | str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wholebatch.memory.budget.device_memory", lambda device: 1000)
    assert parse_memory(memory) == expected


@pytest.mark.parametrize(
    "memory", ["", "lots", "20 Gallons", "-1GiB", "0", 0, -5, 0.0, 1.5, True, "1.5"]
)
def test_budgets_that_mean_nothing(memory: int | float | str) -> None:
    with pytest.raises(OptionError, match=r"memory=.*: must be a size such as \"20GiB\""):
        parse_memory(memory)


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
    growth=st.sampled_from([2, 64]),
)
def test_finds_the_largest_of_any_bend(
    pieces: list[tuple[int, int]], budget: int, most: int, growth: int
) -> None:
    tried: list[int] = []

    def peak(size: int) -> int:
        tried.append(size)
        return max(constant + slope * size for constant, slope in pieces)

    choice = choose_micro_batch(peak, budget=budget, most=most, growth=growth)
    true = max((size for size in range(1, most + 1) if peak(size) <= budget), default=0)
    if choice is None:
        assert true == 0
        return
    assert peak(choice.micro_batch) <= budget
    assert choice.micro_batch >= min(true - 1, 0.9 * true)
    asked = tried[: len(choice.measured) + len(choice.failed)]
    assert len(asked) == len(set(asked)) <= 24
    assert all(1 <= size <= most for size in asked)


def test_room_for_one_more_piece_on_cuda() -> None:
    prediction = Prediction({"activations": 1000}, {"activations": 0}, largest=300)
    assert prediction.needed(torch.device("cpu")) == 1000
    assert prediction.needed(torch.device("cuda")) == 1300
    assert replace(prediction, largest=10).needed(torch.device("cuda")) == 1040


def test_a_budget_on_a_cpu_changes_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    train = wb.WholeBatch(model, torch.optim.SGD(model.parameters()), loss=loss, memory="1KiB")
    assert "memory='1KiB' changes nothing: the model is on a CPU" in caplog.text
    assert train.step(vectors(32)).micro_batches == 1
    with pytest.raises(OptionError, match="must be a size such as"):
        wb.WholeBatch(model, torch.optim.SGD(model.parameters()), loss=loss, memory="much")


def test_a_size_that_runs_out_of_memory_steps_back() -> None:
    """Memory in pieces: steps fail although the line says that they fit."""
    choice = choose_micro_batch(lambda n: 10 * n if n < 83 else None, budget=1000, most=500)
    assert choice is not None
    assert choice.micro_batch >= 0.9 * 82
    assert choice.failed[0] == 100
    assert choice.summary().startswith(f"micro-batch {choice.micro_batch}: ")
    assert "samples do not fit (budget 1000 bytes)" in choice.summary()
