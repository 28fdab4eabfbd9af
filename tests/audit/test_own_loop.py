"""The checks of an own loop: what each says, and that none of them changes the update."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.support import Seen, mlp, sgd
from wholebatch.audit.own_loop import OwnLoop
from wholebatch.distributed import Local
from wholebatch.errors import LossError, UnsupportedError
from wholebatch.window.observer import Observer, Plan

SIZES = (3, 1, 4, 2, 5)


def trained(audit: bool, windows: int = 3) -> tuple[Any, Any, wb.Accumulator]:
    """Return the parameters and gradients of a loop, with the audit or without."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen = Seen(model, optimizer)
    acc = wb.Accumulator(model, optimizer, steps=len(SIZES), clip_norm=0.1, audit=audit)
    data = torch.Generator().manual_seed(1)
    for _ in range(windows):
        for size in SIZES:
            x = torch.randn(size, 3, generator=data, dtype=torch.float64)
            acc.backward(model(x).square().sum(), units=size)
    return list(model.parameters()), seen.gradients, acc


def test_the_update_is_the_same_bit_for_bit_without_the_audit() -> None:
    with_all, gradients, watched = trained(True)
    with_none, others, alone = trained(False)
    assert isinstance(watched._ledger.observer, OwnLoop)
    assert type(alone._ledger.observer) is Observer
    assert all(torch.equal(a, b) for a, b in zip(with_all, with_none, strict=True))
    assert len(gradients) == len(others) == 3
    for mine, theirs in zip(gradients, others, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


class Tied(nn.Module):
    """An embedding that is the head, too; `sparse` rows have gradients of their own kind."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.rows = nn.Embedding(7, 3, sparse=sparse)
        self.head = nn.Linear(3, 7, bias=False)
        if not sparse:
            self.head.weight = self.rows.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rows(x))
        return out


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(7, 3), nn.Sequential(nn.Dropout(0.3), nn.Linear(3, 7))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.head, self.rows(x), use_reentrant=False)
        return out


CASES: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "sparse": lambda: Tied(sparse=True),
    "checkpointed": Checkpointed,
    "16 bit": lambda: Tied().bfloat16(),
    "batchnorm": lambda: nn.Sequential(nn.Embedding(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 7)),
    "a hook": lambda: hooked(Tied()),
}


def hooked(model: nn.Module) -> nn.Module:
    next(model.parameters()).register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return model


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", ["total", "mean", "parts", "terms", "run"])
def test_every_way_to_a_window_is_the_same_without_the_audit(case: str, way: str) -> None:
    found = []
    for audit in (True, False):
        torch.manual_seed(0)
        model = CASES[case]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        acc = wb.Accumulator(model, optimizer, steps=3, batchnorm="allow", audit=audit)
        data = torch.Generator().manual_seed(1)
        micros = [torch.randint(7, (2, n), generator=data) for n in (3, 2, 4, 5, 2)]

        def loss(micro: Tensor, model: nn.Module = model) -> Tensor:
            return F.cross_entropy(model(micro[0]).float(), micro[1], reduction="sum")

        for place, micro in enumerate(acc.over(micros)):
            units = micro.shape[1]
            if way == "terms" and place % 3 == 0:
                acc.announce({"ce": sum(m.shape[1] for m in micros[place : place + 3])})
            if way == "run":
                acc.run(lambda m, loss=loss: wb.Loss(loss(m), m.shape[1]), micro)
            elif way == "terms":
                acc.backward(wb.Loss.terms({"ce": (loss(micro), units)}))
            elif way == "mean":
                acc.backward(mean=loss(micro) / units, units=units)
            else:
                if way == "parts":
                    acc.backward(loss(micro) * 0.5, units=units, more=True)
                acc.backward(loss(micro), units=units)
        assert acc.updates == 2
        found.append([value.clone() for value in model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# ---------------------------------------------------------------- what each of them says


def watched(*losses: Any, steps: int = 2, models: Any = ()) -> list[str]:
    """Return the warnings of a window with these losses."""
    target: Any = SimpleNamespace(models=models, optimizers=(), sync=Local())
    loop = OwnLoop(target)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop.window_begins(Plan(1, in_parts=True, steps=(steps,)))
        for loss in losses:
            loop.loss_is_known(loss)
        loop.window_closes()
    return [str(warning.message) for warning in caught]


def logits(rows: int) -> Tensor:
    torch.manual_seed(rows)
    made: Tensor = nn.Linear(3, 4)(torch.randn(rows, 3))
    return made


def cross_entropy(rows: int, reduction: str = "mean") -> Tensor:
    labels = torch.arange(rows) % 4
    return F.cross_entropy(logits(rows), labels, reduction=reduction)


@pytest.mark.parametrize("units", [4, torch.tensor(4)])
def test_a_reduction_of_torch_that_contradicts_is_refused(units: Any) -> None:
    with pytest.raises(LossError, match="total is the mean of cross_entropy"):
        watched(wb.Loss(cross_entropy(4), units))
    with pytest.raises(LossError, match="mean is the sum of cross_entropy"):
        watched(wb.mean_loss(cross_entropy(4, "sum"), units))
    right = [wb.Loss(cross_entropy(4, "sum"), units), wb.mean_loss(cross_entropy(4), units)]
    assert watched(*right) == []


def test_means_that_are_added_or_weighted_are_not_refused() -> None:
    one_by_one = functools.reduce(torch.add, [cross_entropy(3) for _ in range(5)])
    assert watched(wb.Loss(one_by_one, 5), wb.Loss(cross_entropy(6) * 6, 6)) == []
    assert watched(wb.Loss(cross_entropy(6), 1), wb.Loss(logits(6).mean(), 6)) == []


def test_a_layer_that_counts_the_rows_of_a_micro_batch_is_refused() -> None:
    layer = nn.Embedding(4, 3, scale_grad_by_freq=True)
    with pytest.raises(UnsupportedError, match="scale_grad_by_freq"):
        watched(wb.Loss(layer(torch.arange(3)).sum(), 3), models=[nn.Sequential(layer)])


DIVIDED: dict[str, tuple[Any, int]] = {
    "a mean": (lambda: wb.mean_loss(cross_entropy(6) / 4, 6), 1),
    "a product": (lambda: wb.mean_loss(cross_entropy(6) * 0.25, 6), 1),
    "a sum": (lambda: wb.Loss(cross_entropy(6, "sum") / 4, 6), 1),
    "by its units": (lambda: wb.Loss(cross_entropy(4, "sum") / 4, 4), 0),
    "by another number": (lambda: wb.mean_loss(cross_entropy(6) / 5, 6), 0),
    "a mean by hand": (lambda: wb.mean_loss(cross_entropy(4, "sum") / 4, 4), 0),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_a_division_by_the_steps_is_told(name: str) -> None:
    loss, told = DIVIDED[name]
    said = watched(loss(), loss(), steps=4)
    assert len(said) == told
    assert all("is divided by 4, and 4 is the number of steps" in text for text in said)


class EveryOperation(TorchDispatchMode):
    """A mode of the user, such as a count of operations: it is given Python numbers of a graph."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **kwargs or {})


def test_a_number_of_the_graph_is_read_inside_of_a_mode_of_the_user() -> None:
    with EveryOperation():
        [said] = watched(
            wb.mean_loss(logits(6).mean() * 0.25, 6), wb.Loss(logits(3).sum(), 3), steps=4
        )
    assert "is divided by 4, and 4 is the number of steps" in said


def test_two_means_over_other_counts_name_terms() -> None:
    def loss(nodes: int, graphs: int) -> wb.Loss:
        return wb.mean_loss(cross_entropy(nodes) + logits(graphs).square().mean(), graphs)

    [said] = watched(loss(8, 2), loss(5, 2))
    assert "no single units= is right: give each its own, wb.Loss.terms" in said
    assert not watched(loss(8, 2), loss(8, 2))


# ---------------------------------------------------------------- rows


def similarities(model: nn.Module, x: Tensor) -> Tensor:
    z = model(x)
    return F.cross_entropy(z @ z.T, torch.arange(len(x)), reduction="sum")


def two_views(model: nn.Module, x: Tensor) -> Tensor:
    # No name holds the outputs: only the graph knows them.
    return F.cross_entropy(model(x) @ model(x + 1).T, torch.arange(len(x)), reduction="sum")


def squares(model: nn.Module, x: Tensor) -> Tensor:
    total: Tensor = model(x).square().sum()
    return total


class Mixes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out - out.mean(0)


class Moves(nn.Linear):
    """Has a running mean."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean: Tensor = 0.9 * self.mean + 0.1 * x.mean(0)
        return super().forward(x)


class Counts(nn.Linear):
    """Adds up what it has seen: two parts make of it what the whole makes."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen: Tensor = self.seen + x.sum(0)
        return super().forward(x)


LINKED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "similarities": (lambda: nn.Linear(3, 4), similarities, "links 6 of the 6 rows"),
    "two views": (lambda: nn.Linear(3, 4), two_views, "links 6 of the 6 rows"),
    "a mean over the rows": (lambda: Mixes(3, 4), squares, "for one of 6 rows depends on the"),
    "a running mean": (Moves, squares, "a forward moves mean"),
    "sums of what was seen": (Counts, squares, ""),
    "dropout": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout()), squares, ""),
    "nothing": (lambda: nn.Linear(3, 4), squares, ""),
}


@pytest.mark.parametrize("name", LINKED)
@pytest.mark.parametrize("units", ["rows", "other"])
def test_rows_that_act_on_each_other_are_told_where_units_count_them(name: str, units: str) -> None:
    make, loss, text = LINKED[name]
    torch.manual_seed(0)
    model = make().double()
    acc = wb.Accumulator(model, sgd(model), steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in torch.randn(4, 6, 3).double():
            acc.backward(loss(model, x), units=6 if units == "rows" else 12)
    assert acc.updates == 2
    assert len(caught) == (bool(text) and units == "rows")
    if caught:
        message = str(caught[0].message)
        assert text in message
        assert "silences this warning" in message


def test_hooks_are_gone_after_the_first_window_and_with_the_accumulator() -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=2)
    assert model._forward_hooks
    for _ in range(2):
        acc.backward(squares(model, torch.randn(3, 5).double()), units=3)
    assert not model._forward_hooks
    other = wb.Accumulator(model, sgd(model), steps=2)
    assert model._forward_hooks
    gc.disable()
    try:
        del other
        assert not model._forward_hooks
    finally:
        gc.enable()
    assert not wb.Accumulator(model, sgd(model), steps=2, audit=False).updates
    assert not model._forward_hooks


def test_no_output_is_kept_alive() -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=2)
    kept = []
    for _ in range(3):
        out = model(torch.randn(3, 5).double())
        kept.append(weakref.ref(out))
        del out
    assert [one() for one in kept] == [None] * 3
    assert acc.updates == 0


def test_hooks_of_the_user_run_for_the_users_own_calls_only() -> None:
    model = mlp()
    calls = {"forward": 0, "tensor": 0}

    def count(name: str) -> None:
        calls[name] += 1

    model.register_forward_hook(lambda *_: count("forward"))
    acc = wb.Accumulator(model, sgd(model), steps=4)
    for x in torch.randn(4, 3, 5).double():
        out = model(x)
        out.register_hook(lambda _: count("tensor"))
        acc.backward(out.square().sum(), units=3)
    assert calls == {"forward": 4, "tensor": 4}


def test_a_perturbation_that_is_filled_anew_is_no_other_model() -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=3)
    moved = torch.zeros(3, 5, dtype=torch.float64, requires_grad=True)
    for x in torch.randn(3, 3, 5).double():
        with torch.no_grad():
            moved.uniform_(-0.1, 0.1)
        acc.backward(squares(model, x + moved), units=3)
    assert acc.updates == 1
