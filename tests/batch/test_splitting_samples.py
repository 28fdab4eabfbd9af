"""How the number of samples is told: by a contract, never by a silent guess."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from wholebatch.batch import batch_size_of, split
from wholebatch.errors import OptionError, SplitError


@dataclass
class Example:
    ids: Any
    label: int


def images(number: int, channels: int = 3) -> list[torch.Tensor]:
    return [torch.randn(channels, 8 + i, 9) for i in range(number)]


def targets(number: int) -> list[dict[str, torch.Tensor]]:
    return [{"boxes": torch.randn(i, 4), "labels": torch.ones(i)} for i in range(1, number + 1)]


x32 = torch.randn(32, 10)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (x32, 32),
        (np.zeros((6, 2)), 6),
        (["a", "b", "c"], 3),
        (("a", "b", "c"), 3),
        ([3, 1, 2], 3),
        # What DataLoader makes of (x, y): the two are parts of the batch, not two samples.
        ([x32, torch.ones(32)], 32),
        ([x32, x32.clone()], 32),
        ((x32[:2], x32[:2]), 2),
        ([x32[:3], x32[:3], torch.randn(1, 10)], 3),
        ([x32, tuple("ab" * 16)], 32),
        ([("a", "b", "c"), ("d", "e", "f")], 3),
        ({"x": x32, "image_size": (224, 224), "scales": [1.0, 2.0], "y": torch.ones(32)}, 32),
        ({"views": [x32, x32.clone()], "y": torch.ones(32)}, 32),
        (((x32, x32.clone()), torch.ones(32)), 32),
        ([{"q": x32}, {"labels": torch.ones(32)}], 32),
        # Twelve layers of keys and values beside a batch of 32, and beside one of 12.
        ({"ids": x32, "past": tuple((x32, x32) for _ in range(12))}, 32),
        ({"ids": x32[:12], "past": tuple((x32[:12], x32[:12]) for _ in range(12))}, 12),
        # Samples in lists, as detection and uncollated datasets have them.
        ({"images": images(4), "labels": torch.ones(4)}, 4),
        ({"images": images(1), "labels": torch.ones(1)}, 1),
        ((images(4), targets(4)), 4),
        ((tuple(images(4)), tuple(targets(4))), 4),
        ({"sequences": [torch.randn(t, 4) for t in (5, 7, 6, 9)], "y": torch.ones(4)}, 4),
        ([{"ids": torch.ones(t), "label": 1} for t in (5, 7, 6)], 3),
        ([Example(torch.ones(t), 1) for t in (5, 7, 6)], 3),
        ({"ids": [[1, 2, 3], [4, 5], [6]], "label": [0, 1, 0]}, 3),
        ({"x": torch.ones(4), "maybe": [None, torch.ones(3), None, torch.ones(2)]}, 4),
        ({"x": torch.ones(4), "empty": []}, 4),
    ],
)
def test_the_number_of_samples(batch: Any, size: int) -> None:
    assert batch_size_of(batch) == size


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.ones(100, 2), "y": torch.ones(99)}, "'x' has 100 rows, and 'y' has 99: each"),
        ((torch.ones(100, 2), torch.ones(99)), "'0' has 100 rows, and '1' has 99: each"),
        ({"x": x32, "y": torch.ones(32), "w": torch.ones(10)}, "'w' has 10: .*static='w'"),
        ({"pos": torch.ones(5), "x": x32, "y": torch.ones(32)}, "'x' has 32: .*static='pos'"),
        ([torch.randn(t, 4) for t in (5, 7, 6)], "'0' has 5 rows, and '1' has 7"),
        ({"x": x32, "layers": [torch.ones(n, n) for n in range(2, 12)]}, "'layers.0' has 2"),
    ],
)
def test_a_tensor_with_other_rows_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(SplitError, match=message):
        split(batch, 2)


def test_the_advice_about_other_rows_works() -> None:
    batch = {"x": x32, "w": torch.ones(10)}
    with pytest.raises(SplitError, match=r"one row for each sample.*static='w'"):
        split(batch, 2)
    micro_batches = split(batch, 20, static="w")
    assert [len(micro["x"]) for micro in micro_batches] == [20, 12]
    assert all(micro["w"] is batch["w"] for micro in micro_batches)
    with pytest.raises(SplitError, match="batch_size= says 32 rows, and 'w' has 10"):
        split(batch, 20, batch_size=32)
    assert [len(m["w"]) for m in split(batch, 6, batch_size=10, static="x")] == [6, 4]
    shared = {"x": x32, "position": torch.ones(1, 10)}
    assert all(micro["position"] is shared["position"] for micro in split(shared, 20))


def test_the_batch_size_may_be_a_function_of_the_batch() -> None:
    for number in (5, 4):
        micro_batches = split(images(number), 3, batch_size=len)
        assert [len(micro) for micro in micro_batches] == [3, number - 3]
        assert all(image.shape[0] == 3 for micro in micro_batches for image in micro)


def test_lists_are_read_as_samples_or_as_parts() -> None:
    sequences = [torch.randn(t, 4) for t in (5, 4, 6, 4)]  # two are by chance as long as the batch
    first, second = split({"s": sequences, "y": torch.ones(4)}, 3)
    assert [len(t) for t in first["s"] + second["s"]] == [5, 4, 6, 4]
    past = tuple((torch.randn(4, 2), torch.randn(4, 2)) for _ in range(4))
    first, second = split({"past": past, "y": torch.ones(4)}, 3)
    assert [len(keys) for keys, _ in second["past"]] == [1] * 4
    boxes = [{"boxes": torch.ones(4, 4)} for _ in range(4)]
    first, second = split({"t": boxes, "y": torch.ones(4)}, 3)
    assert [len(m["t"]) for m in (first, second)] == [3, 1]


def test_the_parts_of_a_batch_are_not_samples_though_there_are_as_many() -> None:
    batch = [x32[:3], x32[3:6], torch.randn(1, 10)]
    assert [[len(part) for part in micro] for micro in split(batch, 2)] == [[2, 2, 1], [1, 1, 1]]


def test_a_list_that_fits_both_readings_is_refused() -> None:
    batch: dict[str, Any] = {"images": images(3), "labels": torch.ones(3)}
    with pytest.raises(SplitError, match=r"list 'images' has 3 items, and each has a first dim"):
        split(batch, 2)
    as_parts = {**batch, "images": tuple(batch["images"])}
    assert [len(i) for i in split(as_parts, 2)[0]["images"]] == [2, 2, 2]
    as_samples = {**batch, "images": [{"image": image} for image in batch["images"]]}
    assert [len(micro["images"]) for micro in split(as_samples, 2)] == [2, 1]


def test_static_leaves_are_passed_on_although_their_size_fits() -> None:
    weights = torch.ones(4)
    batch = {"x": torch.ones(4, 2), "aux": {"class_weights": weights, "y": torch.ones(4)}}
    first, last = split(batch, 3, static=("aux.class_weights",))
    assert first["aux"]["class_weights"] is last["aux"]["class_weights"] is weights
    assert len(last["aux"]["y"]) == 1
    first, last = split(batch, 3, static=["aux"])
    assert first["aux"] is batch["aux"]
    assert len(split((torch.ones(4), weights), 3, static="1")[1][1]) == 4


def test_a_static_name_that_does_not_exist_is_refused() -> None:
    batch = {"x": torch.ones(4), "aux": {"w": torch.ones(4)}}
    with pytest.raises(
        SplitError, match=r"static='w': the batch has no such leaf; it has x, aux.w"
    ):
        split(batch, 2, static=("aux.w", "w"))
    with pytest.raises(OptionError, match=r"static=\[3\]: must be names of leaves"):
        split(batch, 2, static=[3])  # type: ignore[list-item]


@pytest.mark.parametrize("kind", ["DataLoader", "generator"])
def test_a_loader_in_place_of_a_batch_is_refused(kind: str) -> None:
    loader = DataLoader(TensorDataset(x32), batch_size=8)
    given = loader if kind == "DataLoader" else (batch for batch in loader)
    with pytest.raises(SplitError, match=f"a {kind}.*of a loader, each batch"):
        split(given, 2)


@pytest.mark.parametrize("batch", [None, 3, "text", {}, {"a": None}, {"a": torch.tensor(1.0)}])
def test_a_batch_without_samples_to_split_is_refused(batch: Any) -> None:
    with pytest.raises(SplitError, match="the number of samples is not known"):
        split(batch, 2)


@pytest.mark.filterwarnings("ignore:.*beta state:UserWarning")
@pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning")
def test_what_cannot_be_split_is_refused_by_name_unless_it_is_static() -> None:
    parts = [torch.ones(3), torch.ones(2)]
    refused = {
        "PackedSequence": torch.nn.utils.rnn.pack_sequence(parts),
        r"nested \(jagged\) tensor": torch.nested.nested_tensor(parts, layout=torch.jagged),
        r"nested \(jagged\) tensor,": torch.nested.nested_tensor(parts),
        "torch.sparse_csr tensor": torch.eye(2).to_sparse_csr(),
    }
    for message, leaf in refused.items():
        for batch in ({"y": torch.ones(2), "x": leaf}, {"y": torch.ones(2), "x": [leaf]}):
            with pytest.raises(SplitError, match=message) as caught:
                split(batch, 1)
            assert "'x" in str(caught.value)
        micro = split({"y": torch.ones(2), "x": leaf}, 1, static="x")[0]
        assert micro["x"] is leaf
        with pytest.raises(SplitError, match=f"the batch .* {message}"):
            split(leaf, 1)
