"""What the code of a micro-step reads is known: a change of any of it is noticed.

Each case is a generator: it yields a loss function `loss(model, x)`, and its rest changes what this
function reads. Where Dynamo cannot say what is read, the code must be refused.
"""

from __future__ import annotations

import array
import enum
import json
import os
import random
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.compile.nets import trace_of
from wholebatch.compile.dynamo_settings import Unlisted
from wholebatch.compile.execute_mode import CannotTrace
from wholebatch.compile.graph_inputs import take_apart
from wholebatch.compile.guards import GuardSet
from wholebatch.window.autocast import Full

_getenv = os.getenv
Loss = Callable[[nn.Module, Tensor], Tensor]
Case = Callable[[], Iterator[Loss]]

BETA = 1.0
GLOBAL_TENSOR = torch.ones(4)


def a_global() -> Iterator[Loss]:
    global BETA
    BETA = 1.0
    yield lambda model, x: model(x).sum() * BETA
    BETA = 2.0


def a_closure() -> Iterator[Loss]:
    beta = 1.0
    yield lambda model, x: model(x).sum() * beta
    beta = 2.0


def a_class_attribute() -> Iterator[Loss]:
    class Config:
        beta = 1.0

    yield lambda model, x: model(x).sum() * Config.beta
    Config.beta = 2.0


def a_member_of_an_enumeration_in_a_class() -> Iterator[Loss]:
    class Kind(enum.Enum):
        SUM, MEAN = "sum", "mean"

    class Config:
        kind = Kind.SUM

    yield lambda model, x: model(x).sum() if Config.kind is Kind.SUM else model(x).mean()
    Config.kind = Kind.MEAN


def a_property() -> Iterator[Loss]:
    class Schedule:
        epoch = 0

        @property
        def beta(self) -> float:
            return 1.0 + self.epoch

    schedule = Schedule()
    yield lambda model, x: model(x).sum() * schedule.beta
    schedule.epoch += 1


def a_default() -> Iterator[Loss]:
    def loss(model: nn.Module, x: Tensor, weights: Any = [1.0]) -> Tensor:  # noqa: B006
        return model(x).sum() * weights[0]

    yield loss
    loss.__defaults__[0][0] = 2.0  # type: ignore[index]


def the_mode_of_a_teacher() -> Iterator[Loss]:
    teacher = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    yield lambda model, x: (model(x) - teacher(x)).sum()
    teacher.eval()


def a_hook_put_in() -> Iterator[Loss]:
    net = nn.Sequential(nn.Linear(4, 4))
    yield lambda model, x: (model(x) + net(x)).sum()
    net[0].register_forward_hook(lambda module, inputs, output: output * 2)


def a_teacher_in_its_place() -> Iterator[Loss]:
    held = {"teacher": nn.Linear(4, 4)}
    yield lambda model, x: (model(x) - held["teacher"](x)).sum()
    held["teacher"] = nn.Linear(4, 4)


def a_tensor_in_its_place() -> Iterator[Loss]:
    global GLOBAL_TENSOR
    yield lambda model, x: (model(x) * GLOBAL_TENSOR).sum()
    GLOBAL_TENSOR = torch.ones(4)


def an_array_that_is_written() -> Iterator[Loss]:
    weights = np.ones(4, dtype=np.float32)
    yield lambda model, x: (model(x) * torch.from_numpy(weights)).sum()
    weights[1] = 3.0


def a_number_of_an_array_of_python() -> Iterator[Loss]:
    numbers = array.array("d", [1.0])
    yield lambda model, x: model(x).sum() * numbers[0]
    numbers[0] = 2.0


def an_environment_variable() -> Iterator[Loss]:
    os.environ["WHOLEBATCH_TEST_BETA"] = "1.0"
    yield lambda model, x: model(x).sum() * float(os.environ["WHOLEBATCH_TEST_BETA"])
    os.environ["WHOLEBATCH_TEST_BETA"] = "2.0"


def getenv_by_its_own_name() -> Iterator[Loss]:
    os.environ.pop("WHOLEBATCH_TEST_BETA", None)
    yield lambda model, x: model(x).sum() * float(_getenv("WHOLEBATCH_TEST_BETA", "1"))
    os.environ["WHOLEBATCH_TEST_BETA"] = "2.0"


def a_file() -> Iterator[Loss]:
    path = Path(f"/tmp/wholebatch-{os.getpid()}.json")
    path.write_text("1.0")
    yield lambda model, x: model(x).sum() * json.loads(path.read_text())
    path.write_text("2.0")


def the_time() -> Iterator[Loss]:
    yield lambda model, x: model(x).sum() * (1.0 + time.time() % 1)
    time.sleep(0.01)


def random_of_python() -> Iterator[Loss]:
    yield lambda model, x: model(x).sum() * random.choice([1.0, 2.0])


def a_generator_of_torch() -> Iterator[Loss]:
    generator = torch.Generator()
    yield lambda model, x: (model(x) + torch.randn(4, generator=generator)).sum()


def an_iterator() -> Iterator[Loss]:
    numbers = iter([1.0, 2.0, 3.0])
    yield lambda model, x: model(x).sum() * next(numbers)
    next(numbers)


def a_counter_in_the_loss() -> Iterator[Loss]:
    state = types.SimpleNamespace(calls=0)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        state.calls += 1
        return model(x).sum() * state.calls

    yield loss


def a_list_of_tensors_that_grows() -> Iterator[Loss]:
    outputs: list[Tensor] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x).sum()
        outputs.append(y.detach())
        return y

    yield loss


def a_tensor_that_the_loss_writes() -> Iterator[Loss]:
    total = torch.zeros(4)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        total.add_(1.0)
        return (model(x) * total).sum()

    yield loss


def where_a_tensor_lies() -> Iterator[Loss]:
    yield lambda model, x: model(x).sum() * (2.0 if x.storage_offset() == 0 else 1.0)


def the_rate_of_an_optimizer() -> Iterator[Loss]:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    yield lambda model, x: model(x).sum() * optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 0.2


class _Scaled(torch.autograd.Function):
    scale = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * _SCALE["scale"]


_SCALE = {"scale": 1.0}


def a_backward_of_ones_own() -> Iterator[Loss]:
    _SCALE["scale"] = 1.0
    yield lambda model, x: _Scaled.apply(model(x)).sum()
    _SCALE["scale"] = 2.0


def a_checkpointed_block() -> Iterator[Loss]:
    from torch.utils.checkpoint import checkpoint

    config = types.SimpleNamespace(beta=1.0)

    def block(y: Tensor) -> Tensor:
        return (y * config.beta).tanh()

    yield lambda model, x: checkpoint(block, model(x), use_reentrant=False).sum()
    config.beta = 2.0


def the_default_dtype() -> Iterator[Loss]:
    yield lambda model, x: (model(x) * torch.ones(4, dtype=torch.get_default_dtype())).sum()
    torch.set_default_dtype(torch.float64)


def a_value_in_the_middle_of_a_long_list() -> Iterator[Loss]:
    values = [1.0] * 3000
    state = types.SimpleNamespace(at=2500)
    yield lambda model, x: model(x).sum() * values[state.at]
    values[2500] = 2.0


def an_exception() -> Iterator[Loss]:
    config: dict[str, float] = {}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        try:
            beta = config["beta"]
        except KeyError:
            beta = 1.0
        return model(x).sum() * beta

    yield loss
    config["beta"] = 2.0


_CASES: list[Case] = [
    one
    for name, one in list(globals().items())
    if isinstance(one, types.FunctionType)
    and one.__module__ == __name__
    and not name.startswith("_")
]


_REFUSED = {
    "a_number_of_an_array_of_python": "line .*numbers",
    "a_file": "line .*read_text",
    "the_time": "line .*time.time",
    "random_of_python": "line .*random.choice",
    "a_generator_of_torch": "line .*generator=generator",
    "an_iterator": "line .*next",
    "a_counter_in_the_loss": "(line|it changes) .*state.calls",
    "a_list_of_tensors_that_grows": "it changes outputs",
    "where_a_tensor_lies": "reads storage_offset",
    "a_tensor_that_the_loss_writes": "it changes total",
}
"""Code of which nobody can say whether it gives the same again, and how the reason names it."""


def as_a_sum(number: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], wb.Loss]:
    return lambda model, micro: wb.Loss(number(model, micro), 1)


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.__name__)
def test_a_change_is_noticed_or_the_code_is_refused(case: Case) -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    told = case()
    loss = as_a_sum(next(told))
    reason = _REFUSED.get(case.__name__)
    try:
        if reason is not None:
            with pytest.raises(CannotTrace, match=reason):
                trace_of(model, loss, x, Full())
            return
        guards = GuardSet(loss, model, take_apart(x))
        assert guards.hold(model, x)
        assert next(told, None) is None
        assert not guards.hold(model, x)
        assert guards.broken_by(model, x)
    finally:
        torch.set_default_dtype(torch.float32)


def test_hooks_and_parts_of_the_model_are_compared_all_at_once() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Identity()), torch.randn(3, 4)
    guards = GuardSet(lambda model, x: model(x).sum(-1), model, take_apart(x))
    assert "HOOKS" not in str(guards._manager)
    for kind in ("forward_hook", "forward_pre_hook", "full_backward_hook"):
        hook = getattr(model[1], f"register_{kind}")(lambda *_: None)
        assert guards.broken_by(model, x) == "a hook, or a part, of the model"
        hook.remove()
        assert guards.hold(model, x)
    model[1] = nn.Identity()
    assert not guards.hold(model, x)


def test_code_does_not_run_where_torch_compile_is_switched_off() -> None:
    calls = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(1)
        return model(x).sum()

    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(CannotTrace, match="compile is switched off"),
    ):
        GuardSet(loss, nn.Linear(4, 4), take_apart(torch.randn(3, 4)))
    assert not calls


def test_a_hook_that_requires_gradients_is_passed_over() -> None:
    """PEFT and transformers put one on the embeddings, for checkpointing."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(3, 4)
    hook = model[0].register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    guards = GuardSet(lambda model, x: model(x).sum(-1), model, take_apart(x))
    assert len(model[0]._forward_hooks) == 1
    assert guards.hold(model, x)
    hook.remove()
    assert not guards.hold(model, x)


def test_what_is_taken_out_of_a_micro_batch_is_not_missed() -> None:
    model, micro = nn.Linear(4, 4), {"x": torch.randn(3, 4), "labels": torch.randn(3, 4)}

    def pops(model: nn.Module, micro: dict[str, Tensor]) -> Tensor:
        return (model(micro["x"]) - micro.pop("labels")).square().sum(-1)

    def adds(model: nn.Module, micro: dict[str, Tensor]) -> Tensor:
        micro["logits"] = model(micro["x"])
        return micro["logits"].sum(-1)

    assert GuardSet(pops, model, take_apart(micro)).hold(model, micro)
    with pytest.raises(CannotTrace, match="it changes the micro-batch"):
        GuardSet(adds, model, take_apart(micro))


def test_torch_can_log_the_settings_of_a_capture() -> None:
    settings = Unlisted({print, len})
    assert print in settings
    assert json.dumps(sorted(settings)) == "[]"
