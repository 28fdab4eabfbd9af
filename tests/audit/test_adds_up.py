"""What does not add up over micro-batches is refused before the first step, by its cause."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.support import grouped, mlp, samples, sgd
from wholebatch.audit.adds_up import check_adds_up
from wholebatch.batch.samples import layout_of

SIZES = [(8, 20), (4, 10), (2, 7)]  # of the micro-batch, of the batch
Case = tuple[Callable[[Any, Any], Any], type[Exception], str]


def entropy(model: Any, micro: Any, **options: Any) -> Tensor:
    return F.cross_entropy(model(micro["x"]), micro["y"], **options)


def similarities(model: Any, micro: Any) -> tuple[Tensor, Tensor]:
    z = model(micro["x"])
    return z @ z.T, torch.arange(len(z))


def contrast(model: Any, micro: Any) -> wb.Loss:
    return wb.cross_entropy(*similarities(model, micro))


def contrast_sum(model: Any, micro: Any) -> wb.Loss:
    return wb.Loss(F.cross_entropy(*similarities(model, micro), reduction="sum"), len(micro["y"]))


def contrast_mean(model: Any, micro: Any) -> wb.Loss:
    return wb.mean_loss(F.cross_entropy(*similarities(model, micro)), len(micro["y"]))


def mean_as_sum(model: Any, micro: Any) -> wb.Loss:
    return wb.Loss(entropy(model, micro), len(micro["y"]))


def mean_of_one(model: Any, micro: Any) -> wb.Loss:
    return wb.Loss(entropy(model, micro), 1)


def sum_as_mean(model: Any, micro: Any) -> wb.Loss:
    return wb.mean_loss(entropy(model, micro, reduction="sum"), len(micro["y"]))


def same_units(model: Any, micro: Any) -> wb.Loss:
    return wb.Loss(entropy(model, micro, reduction="sum"), 64)


def other_units(model: Any, micro: Any) -> wb.Loss:
    """A mean over the labels that count, with the number of samples as units."""
    labels = torch.where(micro["x"][:, 0] > 0, micro["y"], -100)
    return wb.mean_loss(F.cross_entropy(model(micro["x"]), labels), len(labels))


class Changed(torch.autograd.Function):
    """Leaves its input, and changes the gradient by `how`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.how(gradients[0]), None


def clipped(model: Any, micro: Any) -> wb.Loss:
    logits = Changed.apply(model(micro["x"]), lambda g: g.clamp(-1e-3, 1e-3))
    return wb.cross_entropy(logits, micro["y"])


def centred_gradient(model: Any, micro: Any) -> wb.Loss:
    logits = Changed.apply(model(micro["x"]), lambda g: g - g.mean(0))
    return wb.cross_entropy(logits, micro["y"])


COUPLES = r"the loss of \d+ samples is .*use wb.Coupled\(encode, loss\)"
CASES: dict[str, Case] = {
    "contrast": (contrast, wb.errors.UnsupportedError, COUPLES),
    "contrast, Loss": (contrast_sum, wb.errors.UnsupportedError, COUPLES),
    "contrast, mean_loss": (contrast_mean, wb.errors.UnsupportedError, COUPLES),
    "a mean as a sum": (
        mean_as_sum,
        wb.errors.LossError,
        r"a mean where a sum is expected. Give wb.mean_loss\(mean, units\)",
    ),
    "a mean of one unit": (
        mean_of_one,
        wb.errors.LossError,
        r"samples are 1, those of their parts 1 and 1: they do not follow the micro-batch",
    ),
    "a sum as a mean": (sum_as_mean, wb.errors.LossError, "a sum given as a mean"),
    "units": (same_units, wb.errors.LossError, r"units of \d samples are 64, .* must add up"),
    "other units": (other_units, wb.errors.UnsupportedError, "what the loss is a mean over"),
    "a clipped gradient": (
        clipped,
        wb.errors.UnsupportedError,
        "a hook on a tensor or module",
    ),
    "a gradient that mixes": (
        centred_gradient,
        wb.errors.UnsupportedError,
        r"its gradient is not: at parameter .* depends on the batch",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_each_cause_is_named_before_anything_moves(name: str, dtype: torch.dtype) -> None:
    loss, kind, says = CASES[name]
    for micro_batch, size in SIZES:
        if name == "other units":  # two samples may have as many labels each
            micro_batch, size = 20, 40
        model = mlp(dtype=dtype)
        before = copy.deepcopy(model.state_dict())
        train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=micro_batch)
        with pytest.raises(kind, match=says) as caught:
            train.step(samples(size, dtype=dtype))
        assert "audit=False skips this test" in str(caught.value)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())
        assert train.updates == 0
    options: Any = {"loss": loss, "micro_batch": 20, "audit": False}
    assert (
        wb.WholeBatch(model, sgd(model), **grouped(options)).step(samples(40, dtype=dtype)).update
    )


def test_what_is_added_once_per_micro_batch_is_named_with_its_amount() -> None:
    def decayed(model: nn.Module, micro: Any) -> wb.Loss:
        penalty = sum(p.square().sum() for p in model.parameters())
        return wb.Loss(entropy(model, micro, reduction="sum") + 0.1 * penalty, len(micro["y"]))

    model = mlp()
    amount = 0.1 * sum(float(p.detach().square().sum()) for p in model.parameters())
    for micro_batch in (16, 8, 4):
        train = wb.WholeBatch(model, sgd(model), loss=decayed, micro_batch=micro_batch)
        with pytest.raises(
            wb.errors.UnsupportedError, match=f"{amount:.6g} is added once per micro-batch"
        ):
            train.step(samples(20))

    def right(model: nn.Module, micro: Any) -> wb.Loss:
        penalty = sum(p.square().sum() for p in model.parameters())
        made = wb.Loss(entropy(model, micro, reduction="sum"), len(micro["y"]))
        return wb.Loss(made.total + 0.1 * penalty * made.units, made.units)

    assert wb.WholeBatch(model, sgd(model), loss=right, micro_batch=4).step(samples(20)).update


def test_a_term_that_does_not_add_up_is_found_among_others() -> None:
    def terms(model: nn.Module, micro: Any) -> Any:
        logits = model(micro["x"])
        total = F.cross_entropy(logits, micro["y"], reduction="sum")
        spread = logits.var(0).sum() * len(logits)
        return wb.Loss.terms({"ce": (total, len(logits)), "spread": (spread, len(logits), 0.1)})

    def units(micro: Any) -> dict[str, int]:
        return {"ce": len(micro["y"]), "spread": len(micro["y"])}

    model = mlp()
    train = wb.WholeBatch(model, sgd(model), loss=terms, units=units, micro_batch=8)
    with pytest.raises(wb.errors.UnsupportedError, match="do not add up to the batch"):
        train.step(samples(20))


def test_a_hook_on_a_module_is_found_and_one_on_a_parameter_is_not() -> None:
    model = mlp()
    model[1].register_full_backward_hook(lambda m, given, got: (given[0].clamp(-1e-3, 1e-3),))
    train = wb.WholeBatch(
        model, sgd(model), loss=lambda m, b: wb.cross_entropy(m(b["x"]), b["y"]), micro_batch=8
    )
    with pytest.raises(wb.errors.UnsupportedError, match="its gradient is not"):
        train.step(samples(20))
    model, seen = mlp(), []
    model[0].weight.register_hook(lambda g: seen.append(1))
    options: Any = {"loss": lambda m, b: wb.cross_entropy(m(b["x"]), b["y"]), "micro_batch": 10}
    wb.WholeBatch(model, sgd(model), **grouped(options)).step(samples(20))
    assert seen == [1]  # on the whole gradient, and never in the look


def test_rounding_that_a_deep_network_amplifies_is_no_mistake() -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (3, *[16] * 23):
        layers += [nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    before = [(n, value, value.dtype) for n, value in model.state_dict(keep_vars=True).items()]
    batch = {"x": torch.randn(16, 3, 16, 16), "y": torch.randint(0, 10, (16,))}

    def detached(model: Any, micro: Any) -> Tensor:
        losses = entropy(model, micro, reduction="none")
        return losses / losses.detach().mean()

    def by_label(model: Any, micro: Any) -> Tensor:
        return entropy(model, micro, reduction="none")

    options: Any = {"micro_batch": 4, "batchnorm": "allow"}
    with pytest.raises(wb.errors.UnsupportedError, match="its gradient is not"):
        wb.WholeBatch(model, sgd(model), loss=detached, **options).step(batch)
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is value and value.dtype is dtype for name, value, dtype in before)
    wb.WholeBatch(model, sgd(model), loss=by_label, **options).step(batch)


def test_samples_without_units_are_looked_at_in_a_later_window() -> None:
    def loss(model: nn.Module, micro: Any) -> wb.Loss:
        return wb.cross_entropy(model(micro["x"]) - model(micro["x"]).mean(0), micro["y"])

    model, batch = mlp(), samples(20)
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=8)
    ignored = {**batch, "y": torch.full((20,), -100)}
    ignored["y"][11] = 1  # not among the samples that the first test takes
    assert train.step(ignored).update == 1
    with pytest.raises(wb.errors.UnsupportedError, match="do not add up to the batch"):
        train.step(batch)


def test_a_part_whose_labels_are_all_ignored_is_named_as_the_cause() -> None:
    def loss(model: nn.Module, micro: Any) -> wb.Loss:
        return wb.mean_loss(F.cross_entropy(model(micro["x"]), micro["y"]), len(micro["y"]))

    model, batch = mlp(), samples(20)
    batch = {**batch, "y": torch.cat([torch.full((6,), -100), batch["y"][6:]])}
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=10)
    with pytest.raises(wb.errors.UnsupportedError) as caught:
        train.step(batch)
    assert "whole batch here:\n  the loss function (loss): it has a value" in str(caught.value)
    assert "If all labels of that part are ignored, its mean is 0 / 0" in str(caught.value)
    assert "units=(labels != -100).sum()" in str(caught.value)


@pytest.mark.parametrize("micro_batch", [5, 20])
@pytest.mark.parametrize("ignored", [[0, 1, 2, 13], [0, 5, 17, 18], [6], range(11)])
def test_a_mean_over_other_units_is_found_wherever_the_ignored_labels_are(
    micro_batch: int, ignored: Sequence[int]
) -> None:
    def loss(model: nn.Module, micro: Any, units: Any = len) -> wb.Loss:
        mean = F.cross_entropy(model(micro["x"]), micro["y"])
        mean = mean.nan_to_num() if mean.isnan() else mean  # all labels may be ignored
        return wb.mean_loss(mean, units(micro["y"]))

    model, batch = mlp(dtype=torch.float64), samples(40)
    batch = {"x": batch["x"].double(), "y": batch["y"].clone()}
    batch["y"][list(ignored)] = -100
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=micro_batch)
    start = copy.deepcopy(model.state_dict())
    with pytest.raises(
        (wb.errors.UnsupportedError, wb.errors.LossError, UserWarning),
        match=r"may count something else.* wb\.Loss\.terms|of this loss do not follow",
    ):
        for _ in range(8):  # Later windows are tested on whole micro-batches.
            train.step(batch)
    model.load_state_dict(start)
    right = partial(loss, units=lambda labels: int((labels != -100).sum()))
    whole = copy.deepcopy(model)
    F.cross_entropy(whole(batch["x"]), batch["y"]).backward()
    sgd(whole).step()
    wb.WholeBatch(model, sgd(model), loss=right, micro_batch=micro_batch).step(batch)
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("gradients", [True, False])
def test_a_mean_over_the_hardest_half_does_not_add_up(count: int, gradients: bool) -> None:
    """Whatever the samples are: no cut may add up by chance."""
    model = mlp()
    generator = torch.Generator().manual_seed(count)

    def run(few: Any) -> wb.Loss:
        losses = entropy(model, few, reduction="none")
        return wb.mean_loss(losses.topk(len(losses) // 2).values.mean(), len(losses))

    for _ in range(10):
        order = torch.randperm(40, generator=generator)[:count]
        batch = {name: leaf[order] for name, leaf in samples(40).items()}
        assert check_adds_up(model, run, layout_of(batch), gradients=gradients).findings
