"""Compiled loss functions in loops of one's own: the same update, and nothing added in silence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb
from tests.compile.nets import Tagger, tagged
from tests.support import EXACT, Whole, distance, mlp, pieces, samples, sgd
from wholebatch.stream import CompiledLoss

SIZES = ((3, 1, 4, 2), (3, 1, 4, 2), (5, 4, 1), (3, 3, 3), (2, 2), (3, 1, 4, 2))
"""The micro-batches of six windows: uneven, and with short ones."""


def traced(compiled: CompiledLoss) -> CompiledLoss:
    """Let graphs run as traced: the compiler takes too long for most tests."""
    compiled.executor._plan.compiles = False
    return compiled


def windows(make: Callable[[int], dict[str, Tensor]]) -> list[list[dict[str, Tensor]]]:
    return [pieces(make(sum(sizes)), sizes) for sizes in SIZES]


def undivided(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["x"]).flatten(0, -2), batch["y"].flatten())


@pytest.mark.parametrize("execute", ["eager", "compile"])
def test_a_compiled_loss_makes_the_update_of_the_undivided_batch(execute: Any) -> None:
    model = Tagger().double()
    whole = Whole(model, loss=undivided, clip_norm=0.3)
    acc = wb.Accumulator(model, sgd(model), steps=4, clip_norm=0.3)

    @acc.compile(execute=execute)
    def loss(micro: dict[str, Tensor]) -> wb.Loss:
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    traced(loss)
    modes = set()
    for window in windows(tagged):
        acc.steps = len(window)
        batch = {name: torch.cat([micro[name] for micro in window]) for name in ("x", "y")}
        wanted = whole.step(batch)
        step = None
        for micro in acc.over(window):
            step = acc.backward(loss(micro))
            modes.add(loss.executor.mode)
        assert step is not None
        assert step.loss == pytest.approx(float(wanted), rel=1e-12)
        assert distance(model.parameters(), whole.model.parameters()) < EXACT
    assert modes == ({"eager"} if execute == "eager" else {"eager", "operations"})


def test_arguments_keywords_extras_and_autocast_are_those_of_the_call() -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=2)
    factor = torch.full((), 2.0, dtype=torch.float64)

    def loss(x: Tensor, *, y: Tensor, scale: float) -> wb.Loss:
        logits = model(x)
        total = scale * factor * functional.cross_entropy(logits, y, reduction="sum")
        hits = (logits.argmax(-1) == y).sum()
        return wb.Loss(total, len(y), extras={"hits": hits, "logits": logits})

    compiled = traced(acc.compile(loss, execute="compile"))
    reference = Whole(model, loss=lambda m, b: 6.0 * functional.cross_entropy(m(b["x"]), b["y"]))
    for number in (6, 6, 6, 6):
        batch = samples(number)
        reference.step(batch)
        for micro in pieces(batch, (3, 3)):
            with torch.no_grad():
                logits = model(micro["x"])
            added = compiled(micro["x"], y=micro["y"], scale=3.0)
            assert distance([added.extras["logits"]], [logits]) < EXACT
            assert int(added.extras["hits"]) == int((logits.argmax(-1) == micro["y"]).sum())
            want = 6.0 * functional.cross_entropy(logits, micro["y"])
            assert float(added) == pytest.approx(float(want), rel=1e-12)
            acc.backward(added)
        assert distance(model.parameters(), reference.model.parameters()) < EXACT
    assert compiled.executor.mode == "operations"
    assert isinstance(compiled(samples(2)["x"], y=samples(2)["y"], scale=1.0).total, Tensor)


def test_autocast_around_the_call_belongs_to_the_forward() -> None:
    model = mlp(dtype=torch.float32)
    acc = wb.Accumulator(model, sgd(model), steps=2)

    def loss(micro: dict[str, Tensor]) -> wb.Loss:
        logits = model(micro["x"])
        found = wb.cross_entropy(logits.float(), micro["y"])
        return wb.Loss(found.total, found.units, extras={"logits": logits})

    compiled = traced(acc.compile(loss, execute="compile"))
    for number in range(12):
        micro = samples(4, dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number < 6):
            added = compiled(micro)
            acc.backward(added)
        # A graph of one autocast state is not used under another.
        kind = torch.bfloat16 if number < 6 else torch.float32
        assert added.extras["logits"].dtype is kind
    assert sum(slot.ready is not None for slot in compiled.executor._slots.values()) == 2


def test_several_losses_of_a_micro_batch_and_eager_ones_between() -> None:
    model = mlp()
    whole = Whole(
        model,
        loss=lambda m, b: (
            functional.cross_entropy(m(b["x"]), b["y"]) + 3.0 * m(b["x"]).square().mean()
        ),
    )
    acc = wb.Accumulator(model, sgd(model), steps=3)

    @acc.compile(execute="compile")
    def first(micro: dict[str, Tensor]) -> wb.Loss:
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    @acc.compile(execute="compile")
    def second(micro: dict[str, Tensor]) -> wb.Loss:
        return wb.Loss(2.0 * model(micro["x"]).square().mean(-1).sum(), len(micro["y"]))

    for compiled in (first, second):
        traced(compiled)
    for _ in range(4):
        batch = samples(9)
        whole.step(batch)
        for micro in pieces(batch, (4, 2, 3)):
            acc.backward(first(micro), more=True)
            total = model(micro["x"]).square().mean(-1).sum()
            acc.backward(total, units=len(micro["y"]), more=True)
            acc.backward(second(micro))
        assert distance(model.parameters(), whole.model.parameters()) < EXACT
    assert {first.executor.mode, second.executor.mode} == {"operations"}


def test_two_accumulators_of_a_gan_train_through_each_other() -> None:
    torch.manual_seed(0)
    make, judge = nn.Linear(3, 4).double(), nn.Linear(4, 1).double()
    own_make, own_judge = copy.deepcopy(make), copy.deepcopy(judge)
    make_step, judge_step = sgd(own_make), sgd(own_judge)
    makers = wb.Accumulator(make, sgd(make), steps=2)
    judges = wb.Accumulator(judge, sgd(judge), steps=2)

    @judges.compile(execute="compile")
    def judged(noise: Tensor, real: Tensor) -> wb.Loss:
        made_up = judge(make(noise).detach()).square()
        return wb.Loss((made_up + (judge(real) - 1).square()).sum(), len(noise))

    @makers.compile(execute="compile")
    def made(noise: Tensor) -> wb.Loss:
        return wb.Loss((judge(make(noise)) - 1).square().sum(), len(noise))

    for compiled in (judged, made):
        traced(compiled)
    generator = torch.Generator().manual_seed(4)
    for _ in range(5):
        noise = torch.randn(7, 3, generator=generator, dtype=torch.float64)
        real = torch.randn(7, 4, generator=generator, dtype=torch.float64)
        parts = list(zip(noise.split(4), real.split(4), strict=True))
        for z, x in wb.over(parts, judges, makers):
            told, fools = judged(z, x), made(z)
            judges.backward(told)
            makers.backward(fools)
        # By hand: both gradients are of the models before either update.
        fooled = (own_judge(own_make(noise)) - 1).square().sum() / 7
        fooled.backward(inputs=list(own_make.parameters()))
        made_up = own_judge(own_make(noise).detach()).square()
        told_apart = (made_up + (own_judge(real) - 1).square()).sum() / 7
        told_apart.backward(inputs=list(own_judge.parameters()))
        for optimizer in (judge_step, make_step):
            optimizer.step()
            optimizer.zero_grad()
        assert distance(judge.parameters(), own_judge.parameters()) < EXACT
        assert distance(make.parameters(), own_make.parameters()) < EXACT
    assert {judged.executor.mode, made.executor.mode} == {"operations"}
    with pytest.raises(wb.errors.WindowError, match="of two models"):
        for z, x in wb.over(parts, judges, makers):
            judges.backward(judged(z, x))
            makers.backward(made(z))  # its last micro-batch would see the new judge


@pytest.mark.parametrize("execute", ["eager", "compile"])
def test_nothing_is_added_in_silence(execute: Any) -> None:
    model, other = mlp(), mlp()
    acc = wb.Accumulator(model, sgd(model), steps=4)
    others = wb.Accumulator(other, sgd(other), steps=4)

    @acc.compile(execute=execute)
    def loss(micro: dict[str, Tensor]) -> wb.Loss:
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    traced(loss)
    for _ in range(4):
        acc.backward(loss(samples(3)))
    micro = samples(3)
    added = loss(micro)
    with pytest.raises(wb.errors.LossError, match="made the backward of its loss already"):
        added * 2.0
    with pytest.raises(wb.errors.LossError, match="made the backward of its loss already"):
        added.backward()
    with pytest.raises(wb.errors.LossError, match="does not require a gradient"):
        others.backward(added.total, units=3)
    with pytest.raises(wb.errors.WindowError, match="another window"):
        others.backward(added)
    for go_on in (
        lambda: loss(micro),
        lambda: acc.backward(model(micro["x"]).sum(), units=3),
        acc.flush,
    ):
        with pytest.raises(wb.errors.WindowError, match="was not given to backward"):
            go_on()
    acc.discard()
    with pytest.raises(wb.errors.WindowError, match="discarded"):
        acc.backward(added)
    acc.discard()
    first = loss(micro)
    acc.backward(first)
    with pytest.raises(wb.errors.WindowError, match="given to backward\\(\\) before"):
        acc.backward(first)
    acc.discard()
    with pytest.raises(wb.errors.WindowError, match="was not given to backward"):
        for part in acc.over(pieces(samples(6), (3, 3))):
            loss(part)
    acc.discard()


def test_a_changed_value_that_the_function_reads_is_seen() -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=2)
    weights = {"of": 1.0}

    @acc.compile(execute="compile")
    def loss(micro: dict[str, Tensor]) -> wb.Loss:
        total = functional.cross_entropy(model(micro["x"]), micro["y"], reduction="sum")
        return wb.Loss(weights["of"] * total, len(micro["y"]))

    traced(loss)
    whole = Whole(
        model, loss=lambda m, b: weights["of"] * functional.cross_entropy(m(b["x"]), b["y"])
    )
    for number in range(6):
        weights["of"] = 1.0 if number < 4 else 0.25
        batch = samples(7)
        whole.step(batch)
        for micro in pieces(batch, (4, 3)):
            acc.backward(loss(micro))
        assert distance(model.parameters(), whole.model.parameters()) < EXACT


def test_without_gradients_it_is_the_function_as_written() -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=2)

    @acc.compile
    def loss(x: Tensor) -> Tensor:
        """Say how large it is."""
        sizes: Tensor = model(x).square().mean(-1)
        return sizes

    assert loss.__doc__ == "Say how large it is."
    with torch.no_grad():
        assert loss(samples(3)["x"]).shape == (3,)
    assert acc.flush() is None
    with pytest.raises(wb.errors.LossError, match="bare scalar"):
        acc.compile(lambda x: model(x).sum())(samples(3)["x"])
    with pytest.raises(wb.errors.OptionError, match="must be a function"):
        acc.compile(3)  # type: ignore[call-overload]
    with pytest.raises(wb.errors.OptionError, match="execute='fast'"):
        acc.compile(loss, execute="fast")  # type: ignore[call-overload]


def test_a_micro_step_that_fails_in_a_graph_breaks_its_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=2)

    @acc.compile(execute="compile")
    def loss(micro: dict[str, Tensor]) -> wb.Loss:
        if micro["x"].shape[0] == 5:
            raise RuntimeError("a sample that cannot be read")
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    traced(loss)
    for _ in range(6):
        acc.backward(loss(samples(3)))
    assert loss.executor.mode == "operations"
    acc.backward(loss(samples(3)))
    with pytest.raises(RuntimeError, match="cannot be read"):
        loss(samples(5))  # before anything was added: the window goes on
    whole = Whole(model)
    twice = {name: torch.cat([leaf, leaf]) for name, leaf in samples(3).items()}
    acc.backward(loss(samples(3)))
    whole.step(twice)
    whole.assert_same(model)
    [prepared] = [slot.ready for slot in loss.executor._slots.values() if slot.ready]

    def half(*_: Any) -> Any:
        next(model.parameters()).grad.add_(1.0)  # type: ignore[union-attr]
        raise torch.OutOfMemoryError("half way")

    acc.backward(loss(samples(3)))
    monkeypatch.setattr(type(prepared.joint), "__call__", half)
    with pytest.raises(torch.OutOfMemoryError):
        loss(samples(3))
    monkeypatch.undo()
    with pytest.raises(wb.errors.WindowError, match="failed half way"):
        loss(samples(3))
    acc.discard()
    for _ in range(2):
        acc.backward(loss(samples(3)))
    whole.step(twice)
    whole.assert_same(model)


def test_a_loss_of_several_terms_is_refused() -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=2)

    @acc.compile
    def loss(x: Tensor) -> Any:
        return wb.Loss.terms({"size": (model(x).square().sum(), len(x))})

    with pytest.raises(wb.errors.LossError, match="terms"):
        loss(samples(3)["x"])
