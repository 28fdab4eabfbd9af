"""What cannot be one graph runs another way, with the same update, and says so once."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.compile.nets import Micro, loss, mode_of, steps_of, traced
from tests.support import Whole, mlp, samples, sgd
from wholebatch.compile import ExecuteWarning, graph_check, micro_step
from wholebatch.compile.graph_check import (
    differs,
    gradients_of,
    is_as_near,
    weights_moved,
    without_autocast,
)
from wholebatch.compile.joint_graph import JointStep
from wholebatch.errors import OptionError


class Wrapped(nn.Module):
    """An MLP whose forward does something more."""

    def __init__(self, more: Callable[[Wrapped, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = mlp()
        self.more = more
        self.calls = 0
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(self.more(self, x))
        return out


def decides(_: Wrapped, x: Tensor) -> Tensor:
    return x if float(x.sum()) < 1e9 else -x


def counts(model: Wrapped, x: Tensor) -> Tensor:
    model.calls += 1
    return x


def keeps(model: Wrapped, x: Tensor) -> Tensor:
    model.last = x
    return x


def draws(_: Wrapped, x: Tensor) -> Tensor:
    return x * (1.0 + 0.0 * random.random())


def hooked() -> nn.Module:
    model = mlp()
    model[0].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            lambda: Wrapped(decides),
            r"branches on the value .*test_fallback.py, line \d+: return x if float",
        ),
        (lambda: Wrapped(counts), "it changes Wrapped.calls, which a graph would do only once"),
        (lambda: Wrapped(keeps), "it changes Wrapped.last, which a graph would do only once"),
        (lambda: Wrapped(draws), "draws from Python's random module"),
        (hooked, "0 has forward hooks"),
    ],
)
def test_runs_eagerly_and_says_why_once(model: Callable[[], nn.Module], reason: str) -> None:
    made = model()
    whole = Whole(made)
    train = traced(made)
    with pytest.warns(ExecuteWarning, match=reason) as said:
        train.step(samples(10))
    train.step(samples(10))
    whole.step(samples(10))
    assert len(said) == 1
    whole.step(samples(10))
    train.step(samples(10))  # a second warning would be an error here
    whole.step(samples(10))
    assert mode_of(train) == "eager"
    whole.assert_same(made)


def test_a_model_that_is_compiled_already_stays_as_it_is() -> None:
    made = mlp()
    compiled: Any = torch.compile(made, backend="eager")
    train = traced(compiled, sgd(made))
    with pytest.warns(ExecuteWarning, match="the model is an OptimizedModule"):
        train.step(samples(8))
    train.step(samples(8))
    assert train.updates == 2


def test_a_parameter_of_the_loss_is_refused() -> None:
    model, temperature = mlp(), nn.Parameter(torch.ones((), dtype=torch.float64))

    def scaled(model: nn.Module, micro: Micro) -> wb.Loss:
        return wb.cross_entropy(model(micro["x"]) * temperature, micro["y"])

    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    train = traced(model, optimizer, loss=scaled)
    with pytest.warns(ExecuteWarning, match="parameters that are not in the model"):
        train.step(samples(8))
    train.step(samples(8))
    assert train.updates == 2


def test_several_micro_batch_types_that_are_opaque() -> None:
    class Opaque:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    def on_pair(model: nn.Module, micro: Any) -> wb.Loss:
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    train = traced(mlp(), loss=on_pair, static=["note"])
    batch = {**samples(8), "note": Opaque(torch.ones(1))}
    with pytest.warns(ExecuteWarning, match="note is a Opaque"):
        train.step(batch)
    train.step(batch)


def test_a_graph_that_gives_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from wholebatch.compile import joint_graph as joint

    right = joint.JointStep.__call__

    def wrong(self: Any, tensors: Any, seeds: Any) -> Any:
        return right(self, tensors, [seed * 1.5 for seed in seeds])

    monkeypatch.setattr(joint.JointStep, "__call__", wrong)
    model = mlp()
    whole = Whole(model)
    train = traced(model)
    with pytest.warns(ExecuteWarning, match="its gradient differs from that of eager code by 5"):
        train.step(samples(10))
    train.step(samples(10))
    whole.step(samples(10))
    whole.step(samples(10))
    assert mode_of(train) == "eager"
    whole.assert_same(model)


def test_a_changed_number_makes_a_new_graph() -> None:
    def scaled(model: Wrapped, x: Tensor) -> Tensor:
        return x * model.scale

    model = Wrapped(scaled)
    whole = Whole(model)
    train = traced(model)
    for scale in (1.0, 1.0, 1.0, 0.5, 0.5):
        model.scale = whole.model.scale = scale
        whole.step(samples(8))
        train.step(samples(8))
    assert mode_of(train) == "operations"
    whole.assert_same(model)


def test_a_changed_number_in_the_loss_makes_a_new_graph() -> None:
    power = 1.0

    def annealed(model: nn.Module, micro: Micro) -> wb.Loss:
        plain = loss(model, micro)
        return wb.Loss(plain.total * power, plain.units)

    model = mlp()
    reference = mlp()
    train = traced(model, loss=annealed)
    eager = wb.WholeBatch(reference, sgd(reference), loss=annealed, micro_batch=4, execute="eager")
    for step in range(6):
        power = 1.0 if step < 3 else 0.25
        found, wanted = train.step(samples(8)), eager.step(samples(8))
        assert found.loss == pytest.approx(wanted.loss, rel=1e-12)
    assert mode_of(train) == "operations"


def test_frozen_and_thawed_parameters_make_a_new_graph() -> None:
    model = mlp()
    whole = Whole(model)
    train = traced(model)
    for frozen in (False, False, False, True, True, True, False):
        for one in (model, whole.model):
            one[0].requires_grad_(not frozen)
        whole.step(samples(8))
        train.step(samples(8))
    whole.assert_same(model)


def test_sizes_that_keep_changing_run_eagerly() -> None:
    model = mlp()
    whole = Whole(model)
    train = traced(model, micro_batch=64)
    for number in range(3, 12):
        whole.step(samples(number))
        train.step(samples(number))
    assert len(steps_of(train)) == 1
    assert mode_of(train) == "eager"
    whole.assert_same(model)


def test_auto_on_the_cpu_is_eager_and_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = mlp()
        train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=4)
        train.step(samples(8))
        train.step(samples(8))
    assert mode_of(train) == "eager"


@pytest.mark.parametrize(
    ("execute", "message"),
    [
        ("fast", "execute='fast': must be one of 'auto', 'eager', 'compile', 'graph'"),
        ("graph", "CUDA graphs need a CUDA device"),
    ],
)
def test_options_are_refused_at_construction(execute: Any, message: str) -> None:
    model = mlp()
    with pytest.raises(OptionError, match=message):
        wb.WholeBatch(model, sgd(model), loss=loss, execute=execute)


def test_exact_batchnorm_runs_undivided_as_a_graph() -> None:
    """The batch is one micro-batch, and its graph moves the running statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    whole = Whole(model)
    train = traced(model, micro_batch=8)
    for number in (8, 8, 8, 16, 8, 8, 8, 8):
        whole.step(samples(number))
        train.step(samples(number))
    # Also after window 8, whose only micro-batch ran eagerly too, to be compared.
    assert mode_of(train) == "operations"
    assert train._runner.executor.notes.reasons == []
    whole.assert_same(model)
    for ours, theirs in zip(model.buffers(), whole.model.buffers(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=0.0)


def test_a_graph_that_is_not_finite_where_eager_code_is_differs() -> None:
    finite, broken = [torch.ones(3)], [torch.tensor([1.0, torch.nan, 1.0])]
    assert differs(broken, finite, "loss", sixteen_bit=True) is not None
    assert differs([torch.full((3,), torch.inf)], finite, "loss", sixteen_bit=True) is not None
    assert differs(finite, broken, "loss", sixteen_bit=True) is None  # Eager code is broken, too.


def test_sixteen_bit_gradients_are_held_against_the_truth() -> None:
    """Two ways of rounding may differ much, if both are as near to the gradients in full."""
    torch.manual_seed(0)
    truth = [torch.randn(50)]
    one, other = ([truth[0] + 0.15 * torch.randn(50)] for _ in range(2))
    assert differs(one, other, "gradient", sixteen_bit=True) is not None
    assert is_as_near(one, other, truth) or is_as_near(other, one, truth)
    wrong = [truth[0] * 1.5]
    assert not is_as_near(wrong, other, truth)
    assert not is_as_near([torch.full((50,), torch.nan)], other, truth)


def test_gradients_in_full_are_those_without_autocast() -> None:
    model = nn.Linear(5, 3)
    micro = {"x": torch.randn(4, 5), "y": torch.randint(0, 3, (4,))}
    with torch.autocast("cpu", torch.bfloat16), without_autocast():
        found = gradients_of(
            model,
            lambda model, micro: wb.cross_entropy(model(micro["x"]), micro["y"]),
            micro,
            list(model.parameters()),
            [torch.tensor(0.5)],
            nullcontext(),
        )
    (0.5 * nn.functional.cross_entropy(model(micro["x"]), micro["y"], reduction="sum")).backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def deep() -> nn.Module:
    """A deep model with BatchNorms, of whose bf16 gradients a third are rounding errors."""
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU()]
    blocks = [copy.deepcopy(nn.Sequential(*layers)) for _ in range(8)]
    for block in blocks:
        nn.init.normal_(block[0].weight, std=0.25)
    return nn.Sequential(nn.Linear(5, 32), *blocks, nn.Linear(32, 3))


def test_moved_weights_show_how_far_rounding_reaches() -> None:
    model = deep()
    parameters, micro = list(model.parameters()), samples(64, dtype=torch.float32)
    before = [parameter.detach().clone() for parameter in parameters]

    def gradients() -> list[Tensor]:
        context = torch.autocast("cpu", torch.bfloat16)
        return gradients_of(model, loss, micro, parameters, [torch.tensor(1.0)], context)

    eager = gradients()
    with weights_moved(parameters):
        moved = gradients()
    assert all(map(torch.equal, parameters, before))
    with without_autocast():
        full = gradients_of(model, loss, micro, parameters, [torch.tensor(1.0)], nullcontext())
    assert differs(full, eager, "gradient", sixteen_bit=True) is not None
    assert is_as_near(full, moved, eager)  # As a graph that rounds less often.
    for factor in (-1.0, 0.4, 1.6):
        assert not is_as_near([factor * one for one in full], moved, eager), factor


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_without_memory_for_full_precision_a_graph_is_compared_with_moved_weights(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """The graph that is right is used, one that is wrong is not, and the weights are restored."""

    @contextmanager
    def too_large() -> Iterator[None]:
        raise torch.OutOfMemoryError
        yield

    moved: list[bool] = []

    @contextmanager
    def counted(parameters: Any) -> Iterator[None]:
        with weights_moved(parameters):
            moved.append(True)
            yield

    def scaled(step: JointStep, *given: Any) -> Any:
        made = run(step, *given)
        torch._foreach_mul_(step._tail[-len(step.used) :], factor)
        return made

    run = JointStep.__call__
    monkeypatch.setattr(JointStep, "__call__", scaled)
    monkeypatch.setattr(micro_step, "without_autocast", too_large)
    monkeypatch.setattr(micro_step, "weights_moved", counted)
    monkeypatch.setattr(
        graph_check, "differs", lambda _, __, what, **___: {"gradient": what}.get(what)
    )
    model, other = mlp().float(), mlp().float()
    train = traced(model, micro_batch=4, precision="bf16")
    plain = traced(other, micro_batch=4, precision="bf16", execute="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExecuteWarning)
        for _ in range(3):
            train.step(samples(8, dtype=torch.float32))
            plain.step(samples(8, dtype=torch.float32))
    assert mode_of(train) == ("operations" if factor == 1.0 else "eager")
    assert moved
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-3)
