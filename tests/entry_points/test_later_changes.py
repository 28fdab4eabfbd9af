"""What the first window could not show: changes after it, other data, and parts of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb
from tests.support import EXACT, Whole, distance, mean, mlp, pieces, samples, sgd

Batch = dict[str, Tensor]
REFUSED = (wb.errors.UnsupportedError, wb.errors.LossError)
SIZES = (4, 3, 4)


class Switched(nn.Module):
    """A perceptron that centres its inputs over the batch once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.centres, self.scale = mlp(), False, 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x - x.mean(0) if self.centres else x) * self.scale
        return out


def clamps(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


def clamped(_: nn.Module, gradients: Any, __: Any) -> tuple[Tensor | None, ...]:
    return tuple(
        None if gradient is None else gradient.clamp(-1e-3, 1e-3) for gradient in gradients
    )


CHANGES: dict[str, Callable[[Any], Any]] = {
    "it centres": lambda model: setattr(model, "centres", True),
    "a BatchNorm": lambda model: model.net.__setitem__(1, nn.BatchNorm1d(16).double()),
    "a hook on a gradient": lambda model: model.net[0].weight.register_post_accumulate_grad_hook(
        clamps
    ),
    "a hook on a module": lambda model: model.net[2].register_full_backward_hook(clamped),
}


ENTRY_POINTS = [(change, "WholeBatch") for change in CHANGES if change != "a BatchNorm"]
# A loop of one's own is checked in its first window alone, but for new BatchNorms.
ENTRY_POINTS += [("a BatchNorm", "Accumulator"), ("a hook on a gradient", "Accumulator")]


@pytest.mark.parametrize(("change", "entry_point"), ENTRY_POINTS)
def test_what_changes_after_the_first_window_is_refused(change: str, entry_point: str) -> None:
    """All of these trained on, with updates that were off by 0.05% to 12%."""
    model, batch = Switched(), samples(sum(SIZES))
    train = wb.WholeBatch(model, sgd(model), loss=a_loss, micro_batch=4, execute="eager")
    acc = wb.Accumulator(model, sgd(model), steps=len(SIZES))

    def step() -> None:
        if entry_point == "WholeBatch":
            train.step(batch)
            return
        for micro in acc.over(pieces(batch, SIZES)):
            acc.backward(mean=mean(model, micro), units=len(micro["y"]))

    step()
    CHANGES[change](model)
    with pytest.raises(REFUSED, match=r"compare|BatchNorm|hook|sample"):
        step()


def test_a_later_batchnorm_has_the_statistics_of_the_whole_batch() -> None:
    model, batch = Switched(), samples(10)
    whole = Whole(model, loss=mean)
    train = wb.WholeBatch(model, sgd(model), loss=a_loss, micro_batch=4, execute="eager")
    for with_norm in (False, True):
        for each in (model, whole.model, whole.start) if with_norm else ():
            CHANGES["a BatchNorm"](each)
        whole.step(batch)
        train.step(batch)
    whole.assert_same(model)


def test_a_later_batchnorm_is_not_frozen_silently() -> None:
    model, batch = Switched(), samples(10)
    train = wb.WholeBatch(model, sgd(model), loss=a_loss, micro_batch=4, batchnorm="freeze")
    train.step(batch)
    CHANGES["a BatchNorm"](model)
    with pytest.raises(REFUSED, match="was added to the model later, and is not frozen"):
        train.step(batch)


def a_loss(model: nn.Module, micro: Batch) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def test_a_value_that_changes_in_every_window_is_looked_at_less_and_less_often() -> None:
    model, calls = Switched(), []
    whole = Whole(model)
    model.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    train = wb.WholeBatch(model, sgd(model), loss=a_loss, micro_batch=5, execute="eager")
    looks = []
    for window in range(9):
        model.scale = whole.model.scale = 1.0 + window  # type: ignore[assignment]
        calls.clear()
        train.step(samples(10))
        whole.step(samples(10))
        looks.append(len(calls) > 2)
    whole.assert_same(model)
    assert [window for window, looked in enumerate(looks) if looked] == [0, 1, 3, 7]


def test_a_window_that_is_left_open_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def fail(acc: Any) -> None:
        with pytest.raises(wb.errors.LossError):
            acc.backward(mean=1.0, units=4)

    ends: dict[Callable[[Any], Any], bool] = {
        lambda acc: None: True,
        lambda acc: acc.flush(): False,
        fail: False,
    }
    for end, told in ends.items():
        model = mlp()
        acc = wb.Accumulator(model, sgd(model), steps=3)
        acc.backward(mean=mean(model, samples(4)), units=4)
        end(acc)
        caplog.clear()
        del acc
        assert ("open window (micro-batches in it: 1), which made no" in caplog.text) is told
        assert ("or loop with over(loader), which closes it" in caplog.text) is told


# ------------------------------------------------------------------ losses of a loop


WEIGHT = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)


def masked(model: nn.Module, micro: Batch) -> Tensor:
    losses = functional.cross_entropy(model(micro["x"]), micro["y"], reduction="none")
    return (losses * micro["mask"]).sum() / micro["mask"].sum()


def penalty(model: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


def each(model: nn.Module, micro: Batch) -> Tensor:
    return functional.cross_entropy(model(micro["x"]), micro["y"], reduction="none")


def ignoring(model: nn.Module, micro: Batch) -> Tensor:
    labels = micro["y"].where(micro["mask"] > 0, -100)
    return functional.cross_entropy(model(micro["x"]), labels)


def weighted(model: nn.Module, micro: Batch) -> Tensor:
    return functional.cross_entropy(model(micro["x"]), micro["y"], weight=WEIGHT)


def with_masks(batch: Batch) -> Batch:
    mask = torch.tensor([1.0, 1, 1, 0, 1, 1, 0, 0, 1, 0, 0], dtype=torch.float64)
    return {**batch, "mask": mask[: len(batch["y"])]}


def windows(backward: Callable[..., Any], splits: Any, loss: Any = mean) -> tuple[int, float]:
    """Train windows of these sizes; return how many, and the distance to the undivided batches."""
    model = mlp()
    whole = Whole(model, loss=loss)
    acc = wb.Accumulator(model, sgd(model), steps=len(splits[0]))
    for sizes in splits:
        batch = with_masks(samples(sum(sizes)))
        for micro in acc.over(pieces(batch, sizes)):
            backward(acc, model, micro)
        whole.step(batch)
    pairs = zip(model.parameters(), whole.start.parameters(), strict=True)
    moved = [now.detach() - was.detach() for now, was in pairs]
    return acc.updates, distance(moved, whole.updates())


def chosen(model: nn.Module, micro: Batch) -> Tensor:
    return each(model, micro)[micro["mask"] > 0].mean()


EVEN, UNEVEN = [(4, 4)], [(5, 3)]


def per_sample(model: nn.Module, micro: Batch) -> Tensor:
    """Return a mean for each sample over as many numbers as its label says."""
    out = model(micro["x"]).square()
    return torch.stack([row[: int(y) + 1].mean() for row, y in zip(out, micro["y"], strict=True)])


def pixels(model: nn.Module, micro: Batch) -> Tensor:
    """Return a mean over another number of pixels in every micro-batch."""
    return model(micro["x"]).square().repeat(1, len(micro["y"])).mean()


def orthogonal(model: Any) -> Tensor:
    return (model[0].weight.T @ model[0].weight).square().mean()


RIGHT: dict[str, tuple[Callable[[nn.Module, Batch], Tensor], Callable[[Batch], Any]]] = {
    "weights": (weighted, lambda micro: WEIGHT[micro["y"]].sum()),
    "a mask": (masked, lambda micro: micro["mask"].sum()),
    "ignored labels": (ignoring, lambda micro: micro["mask"].sum()),
    "a chosen part": (chosen, lambda micro: int(micro["mask"].sum())),
    "a penalty": (lambda m, b: mean(m, b) + penalty(m), lambda micro: len(micro["y"])),
    "a mean of weights": (lambda m, b: mean(m, b) + orthogonal(m), lambda micro: len(micro["y"])),
    "means of samples": (lambda m, b: per_sample(m, b).mean(), lambda micro: len(micro["y"])),
    "pixels": (pixels, lambda micro: len(micro["y"])),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_loop_accepts_a_mean_over_what_it_says(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    loss, units = RIGHT[name]
    splits = [SIZES, (1, 4, 2), (1, 1, 3)]
    updates, off = windows(
        lambda a, m, b: a.backward(mean=loss(m, b), units=units(b)), splits, loss
    )
    assert updates == 3
    assert off <= EXACT
    assert not caplog.text


def test_equal_means_real_and_fake_samples_and_a_list_may_be_one_unit() -> None:
    assert windows(lambda a, m, b: a.backward(mean=mean(m, b), units=1), EVEN)[1] <= EXACT
    both = lambda m, b: each(m, b).mean() + each(m, {**b, "x": b["x"] + 1}).mean()  # noqa: E731

    def judge(acc: Any, model: nn.Module, micro: Batch) -> None:
        acc.backward(each(model, micro).sum(), units=len(micro["y"]), more=True)
        moved = {**micro, "x": micro["x"] + 1}
        acc.backward(each(model, moved).sum(), units=len(micro["y"]))

    assert windows(judge, UNEVEN, both)[1] <= EXACT

    def two(acc: Any, model: nn.Module, micro: Batch) -> None:
        units = int(micro["mask"].sum())
        acc.backward(mean=chosen(model, micro), units=units, more=True)
        acc.backward(chosen(model, micro) * 2 * units, units=units)

    assert windows(two, UNEVEN, lambda m, b: 3 * chosen(m, b))[1] <= EXACT
    assert (
        windows(lambda a, m, b: a.backward(mean=each(m, b)[None].mean(), units=1), UNEVEN)[0] == 1
    )
    with pytest.warns(
        UserWarning, match="5 and 3 in two micro-batches, with units= of 1"
    ) as caught:
        windows(lambda a, m, b: a.backward(mean=each(m, b).mean(), units=1), UNEVEN)
    assert "silences this warning" in str(caught[0].message)


WRONG_UNITS: dict[str, Callable[[nn.Module, Batch], Tensor]] = {
    "a fixed number": lambda m, b: each(m, b).mean(),
    "ignored labels": ignoring,
    "weights": weighted,
}
"""A mean over a mask is not among them: the graph does not show its divisor (docs/laws.md)."""


@pytest.mark.parametrize("name", WRONG_UNITS)
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("given_as", ["mean", "Loss"])
def test_units_that_do_not_follow_the_mean_are_told(name: str, number: int, given_as: str) -> None:
    """The mistake is in the first window, or only in the third: then the fourth tells of it."""
    loss = WRONG_UNITS[name]
    accumulators: list[Any] = []
    told: list[int] = []

    def backward(acc: Any, model: nn.Module, micro: Batch) -> None:
        accumulators.append(acc)
        told.append(len(caught))
        is_right = acc.updates + 1 < number
        right = each(model, micro).mean(), len(micro["y"])
        total, units = right if is_right else (loss(model, micro), 4)
        if given_as == "mean":
            acc.backward(mean=total, units=units)
        else:
            acc.backward(wb.mean_loss(total, units))

    with pytest.warns(UserWarning, match="the units of this loss do not follow") as caught:
        windows(backward, [(5, 3)] * 4)
    assert len(caught) == 1
    assert told.count(0) == (2 if number == 1 else 8)  # backwards before
    assert accumulators[0].updates == 4


def test_a_step_that_is_left_in_the_loop_is_warned_of() -> None:
    model = mlp()
    optimizer = sgd(model)
    acc = wb.Accumulator(model, optimizer, steps=2)
    batch = samples(8)
    for micro in pieces(batch, (4, 4)):
        step = acc.backward(mean=mean(model, micro), units=4)
    assert step is not None
    with pytest.warns(UserWarning, match=r"step\(\) found no gradients.*clip_norm= clips"):
        optimizer.step()
    del acc, step
    optimizer.step()  # The accumulator is gone: nobody is warned.


def test_a_term_has_one_weight_in_a_window() -> None:
    model = mlp()

    def terms(model: nn.Module, micro: Batch) -> Any:
        losses = each(model, micro)
        return wb.Loss.terms({"a": (losses.sum(), len(losses), float(len(losses)))})

    train = wb.WholeBatch(
        model, sgd(model), loss=terms, micro_batch=4, units=lambda b: {"a": len(b["y"])}
    )
    with pytest.raises(wb.errors.LossError, match="the weight of term 'a' is 4 in one"):
        train.step(samples(7))


# ------------------------------------------------------------------ batches


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.head = nn.Embedding(11, 6).double(), nn.Linear(6, 11).double()

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.table(tokens)
        if mask is None:
            hidden = hidden.mean(1, keepdim=True).expand_as(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def texts(longest: int = 9) -> Batch:
    generator = torch.Generator().manual_seed(longest)
    lengths = torch.randint(2, longest, (10,), generator=generator)
    mask = torch.arange(longest) < lengths[:, None]
    ids = torch.randint(1, 11, (10, longest), generator=generator)
    return {
        "input_ids": ids * mask,
        "attention_mask": mask.long(),
        "labels": ids.where(mask, -100),
    }


PADDED: dict[str, Callable[[nn.Module, Batch], Any]] = {
    "a mean over the width": lambda m, b: functional.cross_entropy(
        m(b["input_ids"], b["attention_mask"]).mT, b["labels"], reduction="none"
    ),
    "a pool over the width": lambda m, b: wb.cross_entropy(m(b["input_ids"]), b["labels"], dim=-1),
}


@pytest.mark.parametrize("name", PADDED)
def test_padding_that_counts_is_not_trimmed(name: str) -> None:
    model = Tokens()
    train = wb.WholeBatch(model, sgd(model), loss=PADDED[name], micro_batch=wb.tokens(20))
    with pytest.raises(wb.errors.UnsupportedError, match="uses the trimmed padding"):
        train.step(texts())


def test_targets_beyond_the_mask_are_trained() -> None:
    def loss(model: nn.Module, micro: Batch) -> wb.Loss:
        logits = model(micro["input_ids"], micro["attention_mask"])
        return wb.cross_entropy(logits, micro["targets"], dim=-1)

    model, batch = Tokens(), texts()
    batch["targets"] = torch.arange(90).view(10, 9) % 7
    whole = Whole(model, loss=lambda m, b: loss(m, b).total / b["targets"].numel())
    whole.step(batch)
    wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=wb.tokens(20)).step(batch)
    whole.assert_same(model)


def test_a_leaf_that_is_not_a_value_per_sample_is_refused_in_micro_batches_of_one() -> None:
    model = mlp(4)
    batch = {"x": torch.randn(4, 4).double(), "centre": torch.randn(4).double()}

    def loss(model: nn.Module, micro: Batch) -> Tensor:
        out: Tensor = model(micro["x"] - micro["centre"]).square().sum(1)
        return out

    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=1)
    with pytest.raises(wb.errors.UnsupportedError, match=r"name it: .*static="):
        train.step(batch)
    whole = Whole(model, loss=lambda model, batch: loss(model, batch).mean())
    by_name = wb.samples(1, static="centre", batch_size=4)
    wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=by_name).step(batch)
    whole.step(batch)
    whole.assert_same(model)


@pytest.mark.parametrize("soft", [False, True])
def test_cross_entropy_takes_classes_from_one_dimension(soft: bool) -> None:
    logits = torch.randn(3, 5, 5).double().requires_grad_()
    labels = torch.rand(3, 5, 5).double() if soft else torch.randint(0, 5, (3, 5))
    with pytest.raises(wb.errors.LossError, match="pass dim=-1, or dim=1"):
        wb.cross_entropy(logits, labels)
    torchs = wb.cross_entropy(logits, labels, dim=1)
    torch.testing.assert_close(
        torchs.total / torchs.units, functional.cross_entropy(logits, labels), rtol=1e-12, atol=0
    )
    last = wb.cross_entropy(logits, labels, dim=-1)
    turned = functional.cross_entropy(logits.mT, labels.mT if soft else labels)
    torch.testing.assert_close(last.total / last.units, turned, rtol=1e-12, atol=0)
    with pytest.raises(wb.errors.LossError, match="dim=0: must be"):
        wb.cross_entropy(logits, labels, dim=0)
