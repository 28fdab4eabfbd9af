"""The chosen micro-batch is the largest that fits, and what does not fit is told with a way out."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import wholebatch as wb
from tests.memory.models import CASES, GPT, loss, mlp, tokens, vectors
from wholebatch.errors import OptionError
from wholebatch.memory.activation_checkpointing import is_checkpointed
from wholebatch.memory.budget import device_memory, free_memory, parse_memory
from wholebatch.memory.choose_micro_batch import choose_micro_batch, resize_batch
from wholebatch.memory.make_it_fit import Rung, ladder, refusal
from wholebatch.memory.predict import Prediction, predict_peak, simulating
from wholebatch.memory.trial_step import measure_step
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


def test_a_size_that_runs_out_of_memory_steps_back() -> None:
    """Memory in pieces: steps fail although the line says that they fit."""
    choice = choose_micro_batch(lambda n: 10 * n if n < 83 else None, budget=1000, most=500)
    assert choice is not None
    assert choice.micro_batch >= 0.9 * 82
    assert choice.failed[0] == 100
    assert choice.summary().startswith(f"micro-batch {choice.micro_batch}: ")
    assert "samples do not fit (budget 1000 bytes)" in choice.summary()


def test_the_whole_batch_where_it_fits() -> None:
    choice = choose_micro_batch(lambda size: 10 * size, budget=10**6, most=24)
    assert choice is not None
    assert (choice.micro_batch, choice.failed) == (24, ())
    assert "the whole batch fits" in choice.summary()
    assert choose_micro_batch(lambda size: 10, budget=9, most=24) is None


@pytest.mark.parametrize("name", ["mlp", "gpt", "cnn"])
def test_auto_finds_at_least_nine_tenths_of_the_largest(name: str) -> None:
    """By real steps on the CPU, within an artificial budget; the update is the undivided one."""
    case = CASES[name]
    model = case.make()
    before = [t.detach().clone() for t in model.state_dict().values()]
    optimizer = torch.optim.AdamW(model.parameters())
    batch = case.batch(64)

    def peak(size: int) -> int:
        return predict_peak(model, loss, resize_batch(batch, size), optimizer=optimizer).peak

    budget = int(peak(24) * 1.01)
    options: Any = {"batchnorm": "allow", "memory": budget}
    train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch="auto", **options)
    said = train.choose(batch)
    found = train.micro_batch_size
    assert found is not None
    assert said is not None
    assert f"micro-batch {found}: " in said
    # Nothing from a tenth (or two) more on fits, so the largest is no more than that.
    assert peak(max(found + 2, int(found / 0.9) + 1)) > budget
    assert all(map(torch.equal, before, model.state_dict().values()))
    step = train.step(batch)
    assert train.recoveries == 0
    assert step.micro_batches == -(-64 // found)


def test_a_loss_that_reads_numbers_is_measured_too() -> None:
    model = mlp()

    def reads(model: nn.Module, micro: Any) -> wb.Loss:
        made = loss(model, micro)
        assert float(made.total.detach()) > 0
        return made

    train = wb.WholeBatch(model, torch.optim.SGD(model.parameters()), loss=reads, memory="1GiB")
    train.step(vectors(32))
    assert train.micro_batch_size == 32


def test_room_for_one_more_piece_on_cuda() -> None:
    prediction = Prediction(peak=1000, by_category={}, seconds=0.0, largest=300)
    assert prediction.needed(torch.device("cpu")) == 1000
    assert prediction.needed(torch.device("cuda")) == 1300
    assert replace(prediction, largest=10).needed(torch.device("cuda")) == 1040


def test_measuring_leaves_nothing_behind() -> None:
    model = CASES["cnn"].make()
    loss(model, CASES["cnn"].batch(2)).total.backward()
    before = [t.clone() for t in (*model.parameters(), *model.buffers())]
    gradients = [p.grad for p in model.parameters()]
    micro = CASES["cnn"].batch(4)
    random = torch.get_rng_state()
    assert measure_step(model, loss, [micro, micro]) > 0
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


def ways(model: Any, sample: Any, optimizer: Any, *, budget: int) -> list[Rung]:
    with simulating(model, loss, optimizer=optimizer) as simulation:
        return ladder(simulation, sample, budget=budget)


def test_the_ladder_says_what_each_rung_gives() -> None:
    model, optimizer = gpt()
    sample = texts(1)
    rungs = ways(model, sample, optimizer, budget=1)
    assert [rung.what for rung in rungs] == [
        "as it is",
        "bf16 autocast",
        "bf16 autocast and checkpointing of 4 blocks",
    ]
    assert not any(rung.fits for rung in rungs)
    assert rungs[0].peak > rungs[1].peak > rungs[2].peak
    enough = ways(model, sample, optimizer, budget=rungs[1].peak)
    assert [rung.fits for rung in enough].index(True) == 1
    assert not any(is_checkpointed(module) for module in model.modules())
    assert re.match(
        r"memory=.* one sample needs .*; with bf16 autocast .*, bf16 autocast and "
        r"checkpointing of 4 blocks .*use a smaller model",
        refusal(rungs, 1000),
    )
    assert "one sample needs" in refusal(ways(mlp(), vectors(1), None, budget=1000), 1000)


def test_sixteen_bits_that_do_not_help_are_not_applied() -> None:
    """One short sample of a wide model: the copies of the weights are larger than what is saved."""
    model = GPT(layers=2, width=64, vocabulary=16, length=24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sample = {name: value % 16 for name, value in tokens(1).items()}
    rungs = ways(model, sample, optimizer, budget=1)
    as_is, half, again = rungs
    assert half.peak > as_is.peak > again.peak
    assert again.what == "checkpointing of 2 blocks"
