"""What a leaf is, is decided at the first batch: a length that coincides later changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.support import distance, mlp, sgd
from wholebatch.batch import Roles, split
from wholebatch.batch.samples import layout_of
from wholebatch.errors import SplitError


def samples(number: int, **more: Any) -> dict[str, Any]:
    x = torch.randn(number, 5, dtype=torch.float64)
    return {"x": x, "y": torch.randint(0, 3, (number,)), **more}


def undivided(model: nn.Module, batch: Any, loss: Any) -> nn.Module:
    whole = copy.deepcopy(model)
    total = loss(whole, batch)
    (total.total / total.units).backward()
    sgd(whole).step()
    return whole


def off(model: nn.Module, whole: nn.Module, before: nn.Module) -> float:
    """Return the relative distance of the update from that of the undivided batch."""
    ours, reference = (
        [
            after.detach() - start.detach()
            for after, start in zip(m.parameters(), before.parameters(), strict=True)
        ]
        for m in (model, whole)
    )
    return distance(ours, reference)


def assert_same_updates(model: nn.Module, batches: list[Any], loss: Any, **options: Any) -> None:
    train = wb.WholeBatch(model, sgd(model), loss=loss, **options)
    for batch in batches:
        before = copy.deepcopy(model)
        train.step(batch)
        whole = undivided(before, batch, loss)
        assert off(model, whole, before) <= 1e-12


def test_names_beside_as_many_samples_stay_names() -> None:
    def loss(model: Any, batch: Any) -> wb.Loss:
        return wb.cross_entropy(model(batch["x"]) * len(batch["names"]), batch["y"])

    names = ["cat", "dog", "cow"]
    batches = [samples(number, names=names) for number in (6, 8, 3, 5, 1, 3)]
    assert_same_updates(mlp(), batches, loss, micro_batch=2)


class PatchesAndText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.patches = nn.Embedding(11, 8), nn.Linear(3, 8)
        self.read = nn.Linear(8, 11)

    def forward(self, batch: Any) -> Tensor:
        patches = self.patches(batch["patches"]).tanh().sum(1, keepdim=True)
        logits: Tensor = self.read(self.text(batch["input_ids"]) + patches)
        return logits


def text_and_patches(width: int, number: int = 6) -> dict[str, Any]:
    lengths = torch.tensor([width, *(2 + i % (width - 2) for i in range(1, number))])
    mask = torch.arange(width) < lengths[:, None]
    ids = torch.randint(1, 11, (number, width)).where(mask, 0)
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": ids.where(mask, -100),
        "patches": torch.randn(number, 6, 3, dtype=torch.float64),
    }


def of_tokens(model: Any, batch: Any) -> wb.Loss:
    return wb.cross_entropy(model(batch), batch["labels"])


def test_patches_are_not_trimmed_where_the_text_is_as_wide() -> None:
    batches = [text_and_patches(width) for width in (9, 6, 7, 6)]
    model = PatchesAndText().double()
    assert_same_updates(model, batches, of_tokens, micro_batch=wb.tokens(16))


def test_named_leaves_are_trimmed_in_their_second_dimension() -> None:
    batch = text_and_patches(6)
    batch["patches"] = batch["patches"].cumsum(1)
    first, *_ = split(batch, wb.tokens(12, trim=("input_ids", "patches")))
    assert first["patches"].shape[1] == first["input_ids"].shape[1]
    assert all(part["labels"].shape[1] == 6 for part in split(batch, wb.tokens(12, trim="patches")))
    with pytest.raises(SplitError, match=r"tokens\(trim=\): 'z' must be .* has no such leaf"):
        split(batch, wb.tokens(12, trim=("z",)))
    with pytest.raises(SplitError, match=r"'narrow' must be .* the text is 6 wide"):
        split({**batch, "narrow": torch.ones(6, 4)}, wb.tokens(12, trim="narrow"))


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ({"w": torch.ones(1, 2)}, {"w": torch.ones(4, 2)}, "'w' was passed on whole .* for 4"),
        ({"w": torch.ones(6)}, {"w": torch.ones(1)}, "'w' had one entry for each .* has 1 for 4"),
        ({"n": ["a"] * 6}, {"n": ["a"] * 3}, "'n' had one entry for each .* has 3 for 4"),
        ({"n": ["a"] * 2}, {"n": ["a"] * 4}, "'n' was passed on whole .* for 4"),
        ({"k": 3}, {"k": torch.ones(4)}, "'k' was passed on whole"),
    ],
)
def test_a_role_that_would_change_is_refused_with_its_name(
    first: Any, then: Any, message: str
) -> None:
    roles = Roles()
    layout_of(samples(6, **first), roles=roles)
    with pytest.raises(SplitError, match=f"{message}.*static="):
        layout_of(samples(4, **then), roles=roles)
    layout_of(samples(6, **first), roles=roles)


def test_a_batch_of_one_sample_tells_nothing() -> None:
    roles = Roles()
    for number, weights in ((1, 1), (4, 4), (1, 1), (3, 3)):
        layout = layout_of(samples(number, w=torch.ones(weights)), roles=roles)
        assert all(leaf.batched for leaf in layout.leaves)
    shared = Roles()
    for number in (1, 4, 1):
        layout = layout_of(samples(number, position=torch.ones(1, 5)), roles=shared)
        assert number == 1 or [leaf.batched for leaf in layout.leaves] == [True, True, False]


def test_the_roles_are_saved() -> None:
    def loss(model: Any, batch: Any) -> wb.Loss:
        return wb.cross_entropy(model(batch["x"]) * len(batch["names"]), batch["y"])

    model, names = mlp(), ["cat", "dog", "cow"]
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=2)
    train.step(samples(6, names=names))
    resumed = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=2)
    resumed.load_state_dict(train.state_dict())
    before, batch = copy.deepcopy(model), samples(3, names=names)
    resumed.step(batch)
    whole = undivided(before, batch, loss)
    assert off(model, whole, before) <= 1e-12


def test_one_row_before_many_is_asked_about() -> None:
    batch = {"temperature": torch.ones(1), **samples(24)}
    with pytest.raises(SplitError, match=r"'temperature' has 1 rows, and 'x' has 24") as caught:
        split(batch, 2)
    assert "batch_size=1" in str(caught.value)
    assert len(split(batch, 2, static="temperature")) == 12
    assert len(split(batch, 2, batch_size=24)) == 12
    assert (
        len(split({"ids": torch.ones(1, 9), "y": torch.ones(1, 9), "ends": torch.ones(4)}, 2)) == 1
    )


def test_class_weights_with_as_many_rows_as_the_batch_are_named() -> None:
    """The loss works on the samples together and fails on a part of them: then the hint is true."""
    model = nn.Linear(5, 6).double()
    batch = {**samples(6), "weights": torch.rand(6, dtype=torch.float64)}

    def loss(model: Any, batch: Any) -> wb.Loss:
        return wb.cross_entropy(model(batch["x"]), batch["y"], weight=batch["weights"])

    with pytest.raises(wb.errors.UnsupportedError, match=r"such as 'weights'\), name it"):
        wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=4).step(batch)
    by = wb.samples(4, static="weights")
    assert_same_updates(model, [batch], loss, micro_batch=by)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: float(m(b["x"]).sum()), "returned float: .*without .item"),
        (lambda m, b: m(b["x"]).sum(), "bare scalar"),
        (lambda m, b: m(b["names"]), "must be Tensor, not list"),
        (lambda b, m: m(b["x"]).sum(), "not subscriptable|cannot be interpreted"),
    ],
)
def test_an_error_of_the_loss_itself_is_not_preceded_by_another(
    loss: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=2)
    with pytest.raises(Exception, match=message):
        train.step(samples(6, names=list("abcdef")))
    assert not caplog.records
