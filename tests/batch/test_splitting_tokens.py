"""Micro-batches by tokens: the budget kept, only padding cut, and the update unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import wholebatch as wb
from wholebatch.batch import split, tokens
from wholebatch.errors import OptionError, SplitError, UnsupportedError


def padded(lengths: list[int], width: int | None = None) -> dict[str, Any]:
    """A right-padded batch; the real token `t` of sample `s` is `100 * s + t + 1`."""
    width = max(1, *lengths) if width is None else width
    places = torch.arange(width)
    mask = places < torch.tensor(lengths)[:, None]
    ids = 100 * torch.arange(len(lengths))[:, None] + places + 1
    return {
        "input_ids": ids.where(mask, 0),
        "attention_mask": mask.long(),
        "labels": ids.where(mask, -100),
        "sample": torch.arange(len(lengths)),
        "lengths": torch.tensor(lengths),
        "text": [f"sample {i}" for i in range(len(lengths))],
    }


WAYS: dict[str, dict[str, Any]] = {
    "inferred": {},
    "mask": {"mask": "attention_mask"},
    "ids": {"mask": "input_ids"},  # padding is 0, and no token is
}


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=20),
    extra=st.integers(0, 3),
    slack=st.integers(0, 60),
    way=st.sampled_from(sorted(WAYS)),
)
def test_the_budget_is_kept_and_only_padding_is_cut(
    lengths: list[int], extra: int, slack: int, way: str
) -> None:
    width = max(1, *lengths) + extra
    batch = padded(lengths, width)
    budget = max(1, *lengths) + slack
    size = len(lengths)
    micro_batches = split(batch, tokens(budget, **WAYS[way]), batch_size=size)

    seen = [i for micro in micro_batches for i in micro["sample"].tolist()]
    assert sorted(seen) == list(range(size))
    assert seen == sorted(range(size), key=lambda i: -lengths[i])  # stable, longest first
    for micro in micro_batches:
        rows, wide = micro["input_ids"].shape
        chosen = micro["sample"].tolist()
        assert rows * wide <= budget
        assert wide == max(1, *(lengths[i] for i in chosen))
        for name in ("input_ids", "labels", "attention_mask"):
            assert torch.equal(micro[name], batch[name][chosen][:, :wide])
            assert micro[name].shape == (rows, wide)
        assert not batch["attention_mask"][chosen][:, wide:].any()
        assert micro["text"] == [batch["text"][i] for i in chosen]
        assert torch.equal(micro["lengths"], batch["lengths"][chosen])


def test_a_hole_in_the_mask_and_left_padding_are_not_cut() -> None:
    mask = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 1, 0]])
    micro_batches = split({"attention_mask": mask, "x": torch.ones(2, 5)}, tokens(4))
    assert [m["attention_mask"].tolist() for m in micro_batches] == [[[0, 0, 0, 1]], [[1, 0, 1]]]


def test_labels_that_count_beyond_the_mask_are_refused() -> None:
    """The mask alone says what is padding, whatever a leaf is called; the test of a few sees it."""
    batch = {"x": torch.randn(4, 5), "attention_mask": torch.ones(4, 5), "labels": torch.ones(4, 5)}
    batch["attention_mask"][:2, 3:] = 0
    batch["x"][:2, 3:] = 0  # one value, as padding has: other values would not be trimmed
    model = nn.Linear(1, 1)

    def loss(model: Any, micro: Any) -> wb.Loss:
        errors = (model(micro["x"][..., None])[..., 0] - micro["labels"]).square()
        return wb.Loss(errors.sum(), errors.numel())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=tokens(10))
    with pytest.raises(UnsupportedError, match="the loss or the model uses the trimmed padding"):
        train.step(batch)


def test_numpy_and_nested_leaves_are_trimmed_too() -> None:
    lengths = [2, 5, 1]
    batch = padded(lengths)
    nested = {
        "inputs": {"mask": batch["attention_mask"], "ids": batch["input_ids"].numpy()},
        "text": batch["text"],
    }
    first, second = split(nested, tokens(5, mask="inputs.mask"))
    assert isinstance(second["inputs"]["ids"], np.ndarray)
    assert second["inputs"]["ids"].tolist() == [[1, 2], [201, 0]]
    assert (first["text"], second["text"]) == (["sample 1"], ["sample 0", "sample 2"])


def test_without_a_declaration_nothing_is_cut_and_every_sample_counts_its_width() -> None:
    batch = {"image": torch.ones(5, 3, 2, 2), "ids": torch.arange(20).view(5, 4)}
    micro_batches = split(batch, tokens(9))
    assert [m["ids"].tolist() for m in micro_batches] == [
        batch["ids"][rows].tolist() for rows in (slice(0, 2), slice(2, 4), slice(4, 5))
    ]


def test_a_sample_over_the_budget_is_refused_with_its_length() -> None:
    with pytest.raises(SplitError, match="sample 1 is 9 tokens long, more than the budget of 8"):
        split(padded([3, 9, 2]), tokens(8))


@pytest.mark.parametrize("mask", ["nope", "sample", "additive"])
def test_a_mask_that_does_not_fit_the_batch_is_refused(mask: str) -> None:
    batch = padded([2, 4])
    batch["additive"] = torch.tensor([[0.0, 0.0, -1.0, -1.0]] * 2)
    message = rf"mask='{mask}'\): must name a leaf .* real, .*; the batch has input_ids \(2, 4\), "
    with pytest.raises(SplitError, match=message):
        split(batch, tokens(8, mask=mask))


def test_a_batch_without_tokens_is_refused() -> None:
    with pytest.raises(SplitError, match=r"tokens\(8\): no leaf is \[samples, tokens\]"):
        split({"y": torch.ones(3)}, tokens(8))


@pytest.mark.parametrize("budget", [0, -1, 2.5, True, "x", None])
def test_an_impossible_budget_is_refused(budget: Any) -> None:
    with pytest.raises(OptionError, match=r"tokens\(.*\): must be a positive number of tokens"):
        tokens(budget)


def test_a_multiple_makes_few_widths_and_keeps_every_token() -> None:
    lengths = [37, 3, 12, 64, 50, 9, 33, 21, 17, 5, 60, 2]
    width = 60 + 6
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.arange(1, length + 1)
    by = tokens(160, mask="ids", multiple=16)
    micros = split({"ids": ids}, by)
    widths = {micro["ids"].shape[1] for micro in micros}
    assert widths <= {16, 32, 48, 64}
    assert all(micro["ids"].numel() <= 160 for micro in micros)
    kept = sorted(int((row != 0).sum()) for micro in micros for row in micro["ids"])
    assert kept == sorted(lengths)
    for micro in micros[:-1]:  # as many as the budget takes: one shape for each width
        assert len(micro["ids"]) == 160 // micro["ids"].shape[1]
