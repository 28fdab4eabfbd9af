"""Micro-batches by tokens: the budget kept, only padding cut, and the update unchanged."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb
from wholebatch.batch import Tokens, joined, split, tokens
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
    sort=st.booleans(),
    way=st.sampled_from(sorted(WAYS)),
)
def test_the_budget_is_kept_and_only_padding_is_cut(
    lengths: list[int], extra: int, slack: int, sort: bool, way: str
) -> None:
    width = max(1, *lengths) + extra
    batch = padded(lengths, width)
    budget = max(1, *lengths) + slack
    size = len(lengths)
    micro_batches = split(batch, tokens(budget, sort=sort, **WAYS[way]), batch_size=size)

    seen = [i for micro in micro_batches for i in micro["sample"].tolist()]
    assert sorted(seen) == list(range(size))
    if sort:
        assert seen == sorted(range(size), key=lambda i: -lengths[i])  # stable, longest first
    else:
        assert seen == list(range(size))
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


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20), slack=st.integers(0, 60))
def test_packing_is_greedy_so_neighbours_never_fit_together(lengths: list[int], slack: int) -> None:
    budget = max(lengths) + slack
    micro_batches = split(padded(lengths), tokens(budget), batch_size=len(lengths))
    for one, other in itertools.pairwise(micro_batches):
        rows, wide = one["input_ids"].shape
        assert (rows + 1) * max(wide, other["input_ids"].shape[1]) > budget


class Masked(nn.Module):
    """A small model with attention over the real tokens only, and positions that must not shift."""

    def __init__(self, vocabulary: int, width: int, size: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, size)
        self.place = nn.Embedding(width, size)
        self.queries = nn.Linear(size, size)
        self.out = nn.Linear(size, vocabulary)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        scores = self.queries(hidden) @ hidden.transpose(1, 2)
        scores = scores.masked_fill(mask[:, None, :] == 0, -1e30)
        logits: Tensor = self.out(torch.tanh(hidden + scores.softmax(dim=-1) @ hidden))
        return logits


def gradients(model: nn.Module, micro_batches: list[dict[str, Tensor]]) -> Tensor:
    model.zero_grad()
    for micro in micro_batches:
        logits = model(micro["input_ids"], micro["attention_mask"])
        functional.cross_entropy(
            logits.flatten(0, 1), micro["labels"].flatten(), reduction="sum"
        ).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("budget", [17, 24, 50, 1000])
def test_the_summed_gradient_is_that_of_the_undivided_batch(
    budget: int, way: str, sort: bool
) -> None:
    lengths = [3, 17, 1, 8, 0, 8, 12, 2, 5, 16, 1]
    batch = padded(lengths, 20)
    ids = torch.randint(1, 40, (11, 20))
    batch["input_ids"] = ids.where(batch["attention_mask"] == 1, 0)
    batch["labels"] = ids.roll(-1, 1).where(batch["attention_mask"] == 1, -100)
    model = Masked(40, 20).double()
    whole = gradients(model, [batch])
    micro_batches = split(batch, tokens(budget, sort=sort, **WAYS[way]))
    assert len(micro_batches) == 1 or budget < 1000
    parts = gradients(model, micro_batches)
    assert (parts - whole).norm() / whole.norm() <= 1e-12


def test_samples_of_length_zero_go_last_and_keep_one_column() -> None:
    micro_batches = split(padded([0, 4, 0, 0]), tokens(4))
    assert [m["sample"].tolist() for m in micro_batches] == [[1], [0, 2, 3]]
    assert micro_batches[1]["input_ids"].shape == (3, 1)
    (only,) = split(padded([0, 0]), tokens(4))
    assert only["input_ids"].shape == (2, 1)


def test_neighbours_in_the_given_order_are_views() -> None:
    batch = padded([4, 3, 3, 3])
    for micro in split(batch, tokens(8, sort=False)):
        assert micro["input_ids"].untyped_storage().data_ptr() == (
            batch["input_ids"].untyped_storage().data_ptr()
        )


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


def test_numpy_sparse_and_nested_leaves_are_trimmed_too() -> None:
    lengths = [2, 5, 1]
    batch = padded(lengths)
    nested = {
        "inputs": {"mask": batch["attention_mask"], "ids": batch["input_ids"].numpy()},
        "sparse": batch["input_ids"].to_sparse(),
        "text": batch["text"],
    }
    first, second = split(nested, tokens(5, mask="inputs.mask"))
    assert isinstance(second["inputs"]["ids"], np.ndarray)
    assert second["inputs"]["ids"].tolist() == [[1, 2], [201, 0]]
    assert second["sparse"].to_dense().tolist() == [[1, 2], [201, 0]]
    assert (first["text"], second["text"]) == (["sample 1"], ["sample 0", "sample 2"])


def test_without_a_declaration_nothing_is_cut_and_every_sample_counts_its_width() -> None:
    batch = {"image": torch.ones(5, 3, 2, 2), "ids": torch.arange(20).view(5, 4)}
    micro_batches = split(batch, tokens(9))
    assert [m["ids"].tolist() for m in micro_batches] == [
        batch["ids"][rows].tolist() for rows in (slice(0, 2), slice(2, 4), slice(4, 5))
    ]


@pytest.mark.parametrize(
    "mask", [torch.zeros(3, 1, 4, 4), torch.tensor([[0.0, 0.0, -1e9, -1e9]] * 3), None]
)
def test_an_attention_mask_of_another_kind_declares_nothing(mask: Tensor | None) -> None:
    batch = {"attention_mask": mask, "ids": torch.ones(3, 4)}
    assert [m["ids"].shape for m in split(batch, tokens(8))] == [(2, 4), (1, 4)]


def test_tokens_in_another_dimension_are_refused() -> None:
    batch = padded([2, 4, 1])
    batch["bias"] = torch.arange(48).view(3, 1, 4, 4)
    with pytest.raises(SplitError, match=r"'bias' is \(3, 1, 4, 4\).*inside the loss function"):
        split(batch, tokens(4))


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": ""}, r"tokens\(mask=''\): must be the name of a leaf"),
        ({"mask": 3}, r"tokens\(mask=3\): must be the name of a leaf"),
    ],
)
def test_impossible_options_are_refused_before_any_batch(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        tokens(8, **options)


def test_tokens_is_a_value() -> None:
    assert tokens(8, mask="x") == Tokens(8, mask="x")
    assert str(tokens(4096)) == "4096 tokens"
    with pytest.raises(AttributeError):
        tokens(8).budget = 9  # type: ignore[misc]


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


def test_a_multiple_never_widens_the_batch_or_breaks_the_budget() -> None:
    ids = torch.ones(3, 50, dtype=torch.long)
    micros = split({"ids": ids}, tokens(55, mask="ids", multiple=64))
    assert [tuple(micro["ids"].shape) for micro in micros] == [(1, 50)] * 3
    wide = torch.zeros(2, 70, dtype=torch.long)
    wide[:, :50] = 1
    micros = split({"ids": wide}, tokens(55, mask="ids", multiple=64))
    assert [tuple(micro["ids"].shape) for micro in micros] == [(1, 50)] * 2


@pytest.mark.parametrize("multiple", [0, -64, 1.5, True, "64"])
def test_an_impossible_multiple_is_refused(multiple: Any) -> None:
    with pytest.raises(OptionError, match="multiple="):
        tokens(128, multiple=multiple)


def test_batches_of_several_widths_are_joined() -> None:
    """Narrow ones are padded on the right; what differs in another way stays apart."""
    wide = {"input_ids": torch.arange(1, 9).view(2, 4), "labels": torch.ones(2, 4).long()}
    wide["input_ids"][1, 3], wide["labels"][1, 3] = 0, -100
    narrow = {"input_ids": torch.tensor([[7, 8]]), "labels": torch.tensor([[-100, 3]])}
    by = tokens(8, mask="input_ids")
    whole = joined([wide, narrow], by)
    assert whole["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 0], [7, 8, 0, 0]]
    assert whole["labels"][2].tolist() == [-100, 3, -100, -100]
    assert joined([wide, narrow]) is None  # nothing says what is padding
    assert joined([wide, narrow], tokens(8)) is None
    assert joined([wide, {**narrow, "more": 1}], by) is None
    assert joined([{**wide, "t": 1}, {**narrow, "t": 2}], by) is None
    assert joined([{**wide, "z": torch.ones(2, 3)}, {**narrow, "z": torch.ones(1, 5)}], by) is None
    assert joined([{"x": torch.ones(2, 3)}, {"x": torch.ones(1, 3).long()}]) is None
    masked = [{**one, "mask": (one["input_ids"] != 0).long()} for one in (wide, narrow)]
    assert joined(masked, tokens(8, mask="mask"))["mask"].sum() == 9
