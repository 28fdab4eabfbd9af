"""The loss contract and its helpers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import wholebatch as wb
from tests.support import EXACT, mlp, samples, sgd, summed
from wholebatch.errors import LossError
from wholebatch.losses import sliced_cross_entropy
from wholebatch.losses.loss import Terms, as_loss


def scalar(value: float = 1.0) -> torch.Tensor:
    return torch.tensor(value, requires_grad=True) * 1.0


def test_per_unit_losses_mean_their_sum_over_their_number() -> None:
    per_unit = torch.ones(3, 4, requires_grad=True) * 2
    loss = as_loss(per_unit)
    assert isinstance(loss, wb.Loss)
    assert (loss.total.item(), loss.units) == (24.0, 12)


def test_a_bare_scalar_is_refused_with_the_question_and_the_helpers() -> None:
    with pytest.raises(LossError, match=r"a sum or a mean\?.*wb\.Loss.*wb\.mean_loss"):
        as_loss(scalar())


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (None, "NoneType"),
        (1.0, "float"),
        ((scalar(), 3), r"\(Tensor, int\)"),
        ({"loss": scalar()}, "dict"),
    ],
)
def test_other_results_are_refused_by_their_type(result: Any, kind: str) -> None:
    with pytest.raises(LossError, match=rf"returned {kind}: must be wb\.Loss"):
        as_loss(result)


@pytest.mark.parametrize(
    ("total", "units", "message"),
    [
        (3.0, 1, r"total=3.0 is a float: must be a 0-dim tensor, the sum .*without \.item\(\)"),
        (torch.ones(2, requires_grad=True), 1, r"total of shape \(2,\).*call \.sum\(\)"),
        (torch.tensor(1.0), 1, r"total does not require a gradient.*without \.detach\(\)"),
        (scalar(), -1, "finite and not negative"),
        (scalar(), float("nan"), "finite and not negative"),
        (scalar(), float("inf"), "finite and not negative"),
        (scalar(), True, "must be a number or a 0-dim tensor"),
        (scalar(), "12", "must be a number or a 0-dim tensor"),
        (scalar(), torch.ones(2), r"units of shape \(2,\)"),
        (scalar(), torch.tensor(1j), "must be real"),
    ],
)
def test_what_is_no_sum_with_units_is_refused(total: Any, units: Any, message: str) -> None:
    with pytest.raises(LossError, match=message):
        wb.Loss(total, units)


@pytest.mark.parametrize(
    ("mean", "message"),
    [
        (1.5, r"mean=1.5 is a float: must be a 0-dim tensor, the mean .*without \.item\(\)"),
        ({"a": scalar()}, r"^mean is a dict: must be .*Add losses .*same units.*wb\.Loss\.terms"),
        (torch.ones(2, requires_grad=True), r"mean of shape \(2,\).*call \.mean\(\) on per-unit"),
        (torch.tensor(1.0), r"mean does not require a gradient.*without \.detach\(\)"),
    ],
)
def test_what_is_no_mean_is_refused_as_a_mean(mean: Any, message: str) -> None:
    with pytest.raises(LossError, match=message):
        wb.mean_loss(mean, 2)
    model = torch.nn.Linear(1, 1)
    acc = wb.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    with pytest.raises(LossError, match=message):
        acc.backward(mean=mean, units=2)


def test_terms_take_two_or_three_parts() -> None:
    terms = wb.Loss.terms({"lm": (scalar(), 3), "aux": (scalar(), torch.tensor(2), 0.5)})
    assert isinstance(terms, Terms)
    assert terms.by_name["lm"].weight == 1.0
    assert terms.by_name["aux"].weight == 0.5
    for bad, message in (
        ({}, "at least one term"),
        ({"a": (scalar(),)}, r"\(total, units\) or \(total, units, weight\)"),
        ({"a": scalar()}, r"\(total, units\) or \(total, units, weight\)"),
        ({"a": (scalar(), 1, "x")}, "weight 'x'"),
    ):
        with pytest.raises(LossError, match=message):
            wb.Loss.terms(bad)  # type: ignore[arg-type]


def test_a_mean_over_no_units_adds_nothing_in_a_traced_graph() -> None:
    """As on a GPU: the units of a later micro-batch are not known when the graph is made."""

    def total(mean: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
        return wb.mean_loss(mean, units).total

    mean = torch.tensor(2.0, requires_grad=True)
    graph = make_fx(total, tracing_mode="fake")(mean, torch.tensor(3))
    cases = [(2.0, 3), (math.nan, 0), (0.0, 0), (2.0, 0)]  # the last one would be lost
    totals = [graph(torch.tensor(value), torch.tensor(units)).item() for value, units in cases]
    assert totals == pytest.approx([6.0, 0.0, 0.0, math.nan], nan_ok=True)


@pytest.mark.parametrize("units", [6, 6.0, torch.tensor(6)])
def test_mean_loss_turns_a_mean_into_its_sum(units: Any) -> None:
    assert wb.mean_loss(scalar(0.5), units).total.item() == 3.0


@pytest.mark.parametrize("units", [1001, torch.tensor(1001)])
def test_a_mean_of_16_bits_is_multiplied_in_32(units: Any) -> None:
    assert wb.mean_loss(scalar(1.0).bfloat16(), units).total.item() == 1001.0
    assert wb.mean_loss(scalar(100.0).half(), units).total.item() == 100100.0


def test_probabilities_as_labels() -> None:
    logits = torch.randn(4, 6, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.rand(4, 6, 5, dtype=torch.float64).softmax(-1)
    weight = torch.rand(5, dtype=torch.float64)
    loss = wb.cross_entropy(logits, labels, weight=weight, label_smoothing=0.1, dim=-1)
    mean = functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(0, 1), weight=weight, label_smoothing=0.1
    )
    assert loss.units == 24
    assert abs(loss.total.item() / 24 - mean.item()) <= EXACT


@pytest.mark.parametrize("units", [-3.0, float("nan"), float("inf")])
def test_units_on_a_device_are_checked_at_the_close(units: float) -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=2)
    acc.backward(summed(model, samples(4)), units=torch.tensor(4))
    with pytest.raises(LossError, match=r"of the window's micro-batch 2: must be finite and not"):
        acc.backward(summed(model, samples(4)), units=torch.tensor(units))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("layout", ["last", "torch", "flat"])
def test_cross_entropy_is_torchs_mean_as_a_sum(
    smoothing: float, weighted: bool, layout: str
) -> None:
    logits = torch.randn(4, 6, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 5, (4, 6))
    labels[0, :4] = -100
    weight = torch.rand(5, dtype=torch.float64) if weighted else None
    inputs = {
        "last": (logits, labels),
        "torch": (logits.transpose(1, 2), labels),
        "flat": (logits.reshape(-1, 5), labels.reshape(-1)),
    }[layout]
    loss = wb.cross_entropy(*inputs, weight=weight, label_smoothing=smoothing)
    expected = functional.cross_entropy(
        logits.reshape(-1, 5), labels.reshape(-1), weight=weight, label_smoothing=smoothing
    )
    assert (loss.total / loss.units).item() == pytest.approx(expected.item(), rel=1e-14)
    assert isinstance(loss.units, torch.Tensor)


def test_cross_entropy_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(LossError, match=r"\(4, 5\) and labels of shape \(3,\)"):
        wb.cross_entropy(torch.randn(4, 5), torch.zeros(3, dtype=torch.long))


class Lm(nn.Module):
    def __init__(self, output: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 7)
        self.output = output

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None) -> Any:
        logits = self.table(input_ids)
        return {"object": SimpleNamespace(logits=logits), "tuple": (logits,)}.get(
            self.output, logits
        )


class PositionalLm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.table(tokens)
        return logits


@pytest.mark.parametrize("model", [Lm("tensor"), Lm("object"), Lm("tuple"), PositionalLm()])
def test_causal_lm_takes_the_usual_models_and_batches(model: nn.Module) -> None:
    ids = torch.randint(0, 7, (3, 6))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    expected = functional.cross_entropy(
        model.table(ids)[:, :-1].flatten(0, 1),  # type: ignore[operator]
        labels[:, 1:].flatten(),
        reduction="sum",
    )
    for micro in (
        {"input_ids": ids, "attention_mask": mask},
        {"input_ids": ids, "attention_mask": mask, "labels": labels},
        {"input_ids": ids, "labels": labels},
    ):
        loss = wb.causal_lm(model, micro)
        assert loss.total.item() == pytest.approx(expected.item(), rel=1e-6)
        assert loss.units == 3 * 5 - 2


def test_causal_lm_refuses_what_it_cannot_read() -> None:
    with pytest.raises(LossError, match="mapping with 'input_ids'"):
        wb.causal_lm(PositionalLm(), {"tokens": torch.zeros(1, 2)})
    with pytest.raises(LossError, match=r"return wb.cross_entropy\(model\(inputs\), targets\)"):
        wb.causal_lm(PositionalLm(), (torch.zeros(1, 2), torch.ones(1, 2)))
    with pytest.raises(LossError, match="needs logits of shape"):
        wb.causal_lm(nn.Embedding(7, 7), {"input_ids": torch.tensor([1, 2])})


@pytest.mark.parametrize("rows", [3, 1000])
def test_linear_cross_entropy_is_that_of_the_layers_logits(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(sliced_cross_entropy, "rows_at_once", lambda _: rows)
    head = nn.Linear(4, 9).double()
    hidden = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 9, (2, 5))
    labels[0, 2] = -100
    results = []
    for loss in (
        wb.linear_cross_entropy(hidden, head, labels),
        wb.cross_entropy(head(hidden), labels),
    ):
        gradients = torch.autograd.grad(loss.total, [hidden, *head.parameters()])
        results.append((int(loss.units), [loss.total, *gradients]))
    (units, ours), (wanted_units, wanted) = results
    assert units == wanted_units == 9
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-14)
    with pytest.raises(LossError, match=r"must be an nn\.Linear"):
        wb.linear_cross_entropy(hidden, nn.ReLU(), labels)  # type: ignore[arg-type]
    with pytest.raises(LossError, match=r"labels of shape \(2, 4\)"):
        wb.linear_cross_entropy(hidden, head, labels[:, 1:])


@pytest.mark.parametrize("units", [0, torch.tensor(0)])
def test_a_sum_divided_by_no_units_is_not_lost(units: Any) -> None:
    """A detector's loss without a positive, as a mean: it is infinite, and not 0 / 0."""
    total = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(LossError, match="over units=0"):
        wb.mean_loss(total / 0, units)
