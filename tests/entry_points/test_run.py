"""`Accumulator.run`: the update of the undivided batch, and nothing added in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb
from tests.support import EXACT, Whole, distance, mlp, pieces, samples, sgd
from wholebatch.compile import ExecuteWarning

pytestmark = pytest.mark.usefixtures("graphs_run_as_traced")
Micro = dict[str, Tensor]


def mode(acc: wb.Accumulator, loss: Callable[[Any], Any]) -> str:
    """Return how the last micro-batch of this loss function ran."""
    return acc._functions[loss].executor.mode


def undivided(model: nn.Module, batch: Micro) -> Tensor:
    return functional.cross_entropy(model(batch["x"]).flatten(0, -2), batch["y"].flatten())


def cross_entropy(model: nn.Module) -> Callable[[Micro], wb.Loss]:
    return lambda micro: wb.cross_entropy(model(micro["x"]), micro["y"])


def test_the_loss_of_a_micro_batch_can_be_read_with_its_extras() -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=2, execute="compile")
    factor = torch.full((), 2.0, dtype=torch.float64)

    def loss(micro: tuple[Tensor, Tensor, float]) -> wb.Loss:
        x, y, scale = micro
        logits = model(x)
        total = scale * factor * functional.cross_entropy(logits, y, reduction="sum")
        hits = (logits.argmax(-1) == y).sum()
        return wb.Loss(total, len(y), extras={"hits": hits, "logits": logits})

    reference = Whole(model, loss=lambda m, b: 6.0 * functional.cross_entropy(m(b["x"]), b["y"]))
    for _ in range(4):
        batch = samples(6)
        reference.step(batch)
        for micro in pieces(batch, (3, 3)):
            with torch.no_grad():
                logits = model(micro["x"])
            acc.run(loss, (micro["x"], micro["y"], 3.0))
            reported = acc.last_loss
            assert reported is not None
            assert not reported.total.requires_grad
            assert distance([reported.extras["logits"]], [logits]) < EXACT
            assert int(reported.extras["hits"]) == int((logits.argmax(-1) == micro["y"]).sum())
            want = 6.0 * functional.cross_entropy(logits, micro["y"])
            assert float(reported.total / reported.units) == pytest.approx(float(want), rel=1e-12)
        assert distance(model.parameters(), reference.model.parameters()) < EXACT
    assert mode(acc, loss) == "operations"


def test_autocast_around_the_call_belongs_to_the_forward() -> None:
    model = mlp(dtype=torch.float32)
    acc = wb.Accumulator(model, sgd(model), steps=2, execute="compile")

    def loss(micro: Micro) -> wb.Loss:
        logits = model(micro["x"])
        summed_loss = wb.cross_entropy(logits.float(), micro["y"])
        return wb.Loss(summed_loss.total, summed_loss.units, extras={"logits": logits})

    for number in range(12):
        micro = samples(4, dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number < 6):
            acc.run(loss, micro)
        # A graph of one autocast state is not used under another.
        kind = torch.bfloat16 if number < 6 else torch.float32
        assert acc.last_loss is not None
        assert acc.last_loss.extras["logits"].dtype is kind
    slots = acc._functions[loss].executor.kinds.slots()
    assert sum(slot.ready is not None for slot in slots) == 2


def test_several_losses_of_a_micro_batch_and_eager_ones_between() -> None:
    model = mlp()
    whole = Whole(
        model,
        loss=lambda m, b: (
            functional.cross_entropy(m(b["x"]), b["y"]) + 3.0 * m(b["x"]).square().mean()
        ),
    )
    acc = wb.Accumulator(model, sgd(model), steps=3, execute="compile")
    first = cross_entropy(model)

    def second(micro: Micro) -> wb.Loss:
        return wb.Loss(2.0 * model(micro["x"]).square().mean(-1).sum(), len(micro["y"]))

    for _ in range(4):
        batch = samples(9)
        whole.step(batch)
        for micro in pieces(batch, (4, 2, 3)):
            acc.run(first, micro, more=True)
            total = model(micro["x"]).square().mean(-1).sum()
            acc.backward(total, units=len(micro["y"]), more=True)
            acc.run(second, micro)
        assert distance(model.parameters(), whole.model.parameters()) < EXACT
    assert {mode(acc, first), mode(acc, second)} == {"operations"}


@pytest.mark.parametrize("execute", ["eager", "compile"])
def test_nothing_else_is_added_to_a_window(execute: Any) -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=4, execute=execute)
    loss = cross_entropy(model)
    for _ in range(6):
        acc.run(loss, samples(3))
    model(samples(3)["x"]).sum().backward()
    with pytest.raises(wb.errors.WindowError, match="has changed since the window's last backward"):
        acc.run(loss, samples(3))
    acc.discard()
    with pytest.raises(wb.errors.WindowError, match="a second backward for one micro-batch"):
        for part in acc.over(pieces(samples(6), (3, 3))):
            acc.run(loss, part)
            acc.run(loss, part)
    acc.discard()
    for part in acc.over(pieces(samples(6), (3, 3))):
        with pytest.raises(wb.errors.WindowError, match=r"last=True inside over\(\)"):
            acc.run(loss, part, last=True)
        acc.run(loss, part)


def test_each_window_has_its_own_weights_in_16_bit_whichever_function_begins_it() -> None:
    """A function that comes second in one window and first in the next casts the weights again."""
    model = nn.Linear(5, 3)
    acc = wb.Accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.2),
        steps=2,
        execute="compile",
        audit=False,
    )

    def classified(micro: Micro) -> Tensor:
        logits = model(micro["x"]).float()
        return functional.cross_entropy(logits, micro["y"], reduction="none")

    def squared(micro: Micro) -> Tensor:
        return model(micro["x"]).float().square().sum(-1)

    for number in range(12):
        function = (classified, squared, squared, classified)[number % 4]
        micro = samples(4, dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                wanted = function(micro).sum()
            acc.run(function, micro)
        assert acc.last_loss is not None
        torch.testing.assert_close(acc.last_loss.total, wanted, rtol=1e-2, atol=1e-2)


def test_what_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    def loss(model: nn.Module, micro: Any) -> wb.Loss:
        return cross_entropy(model)(micro)

    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=2)
    micro: Any = samples(3)
    with (
        torch.no_grad(),
        pytest.raises(wb.errors.WindowError, match="to evaluate, call the loss function itself"),
    ):
        acc.run(cross_entropy(model), micro)
    with pytest.raises(wb.errors.LossError, match="bare scalar"):
        acc.run(lambda micro: model(micro["x"]).sum(), micro)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        acc.run(lambda micro: model(micro["x"][:, :1]), micro)
    assert not caplog.records  # the error is not also logged by the test of the loss
    with pytest.raises(wb.errors.OptionError, match="must be a function of the micro-batch"):
        acc.run(3, micro)  # type: ignore[arg-type]
    with pytest.raises(wb.errors.LossError, match="terms"):
        acc.run(lambda m: wb.Loss.terms({"a": (model(m["x"]).sum(), len(m["x"]))}), micro)
    with pytest.raises(wb.errors.OptionError, match="execute='fast'"):
        wb.Accumulator(model, sgd(model), steps=2, execute="fast")  # type: ignore[arg-type]


def test_a_micro_step_that_fails_in_a_graph_breaks_its_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=2, execute="compile")

    def loss(micro: Micro) -> wb.Loss:
        if micro["x"].shape[0] == 5:
            raise RuntimeError("a sample that cannot be read")
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    for _ in range(6):
        acc.run(loss, samples(3))
    assert mode(acc, loss) == "operations"
    acc.run(loss, samples(3))
    with pytest.raises(RuntimeError, match="cannot be read"):
        acc.run(loss, samples(5))  # before anything was added: the window goes on
    whole = Whole(model)
    twice = {name: torch.cat([leaf, leaf]) for name, leaf in samples(3).items()}
    acc.run(loss, samples(3))
    whole.step(twice)
    whole.assert_same(model)
    slots = acc._functions[loss].executor.kinds.slots()
    [prepared] = [slot.ready for slot in slots if slot.ready]

    def half(*_: Any) -> Any:
        next(model.parameters()).grad.add_(1.0)  # type: ignore[union-attr]
        raise torch.OutOfMemoryError("half way")

    acc.run(loss, samples(3))
    monkeypatch.setattr(type(prepared.joint), "__call__", half)
    with pytest.raises(torch.OutOfMemoryError):
        acc.run(loss, samples(3))
    monkeypatch.undo()
    with pytest.raises(wb.errors.WindowError, match="failed half way"):
        acc.run(loss, samples(3))
    acc.discard()
    for _ in range(2):
        acc.run(loss, samples(3))
    whole.step(twice)
    whole.assert_same(model)


def test_a_function_that_is_made_in_the_loop_keeps_its_test() -> None:
    """Each pass of the loop makes another object: the micro-batches are compared all the same."""
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=3)
    for _ in range(4):
        for micro in pieces(samples(12), (5, 4, 3)):
            acc.run(lambda batch: wb.cross_entropy(model(batch["x"]), batch["y"]), micro)
    assert acc.updates == 4
    assert len(acc._functions._functions) == 1

    def over_all(micro: Micro) -> wb.Loss:
        return wb.mean_loss(functional.cross_entropy(model(micro["x"]), micro["y"]), 5)

    with pytest.raises(UserWarning, match="units"):
        for micro in pieces(samples(12), (5, 4, 3)):
            acc.run(lambda batch: over_all(batch), micro)


class PlainObject:
    def __init__(self, micro: Micro) -> None:
        self.x, self.y = micro["x"], micro["y"]


def test_tensors_in_a_plain_object_are_read_at_every_micro_batch() -> None:
    model = mlp()
    whole = Whole(model, loss=undivided)
    acc = wb.Accumulator(model, sgd(model), steps=2, execute="compile")

    def loss(micro: PlainObject) -> wb.Loss:
        return wb.cross_entropy(model(micro.x), micro.y)

    def train() -> None:
        for size in (5, 7, 5):
            whole.step(samples(size))
            micros = [PlainObject(micro) for micro in pieces(samples(size), (size - 2, 2))]
            step = [acc.run(loss, micro) for micro in acc.over(micros)][-1]
            assert step is not None
            assert step.units == size
            assert distance(model.parameters(), whole.model.parameters()) <= EXACT

    with pytest.warns(ExecuteWarning, match=r"micro-batch\.x is a tensor inside an object"):
        train()
