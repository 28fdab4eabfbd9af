"""What the code of a micro-step reads is known: a change of any of it is noticed.

Each case is a generator: it yields a loss function `loss(model, x)`, and its rest changes what this
function reads. Where Dynamo cannot say what is read, the code must be refused.
"""

from __future__ import annotations

import array
import collections
import contextvars
import dataclasses
import enum
import functools
import itertools
import json
import math
import os
import random
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
SETTINGS = {"loss": {"beta": 1.0}}
MODE = "sum"


def _beta() -> float:
    return BETA


def a_global() -> Iterator[Loss]:
    global BETA
    BETA = 1.0
    yield lambda model, x: model(x).sum() * BETA
    BETA = 2.0


def a_global_of_another_function() -> Iterator[Loss]:
    global BETA
    BETA = 1.0
    yield lambda model, x: model(x).sum() * _beta()
    BETA = 2.0


def the_dictionary_of_globals() -> Iterator[Loss]:
    global BETA
    BETA = 1.0
    yield lambda model, x: model(x).sum() * globals()["BETA"]
    BETA = 2.0


def this_module_by_its_name() -> Iterator[Loss]:
    global BETA
    BETA = 1.0
    yield lambda model, x: model(x).sum() * sys.modules[__name__].BETA
    BETA = 2.0


def a_global_mode() -> Iterator[Loss]:
    global MODE
    MODE = "sum"
    yield lambda model, x: model(x).sum() if MODE == "sum" else model(x).square().sum()
    MODE = "squares"


def a_nested_dictionary() -> Iterator[Loss]:
    SETTINGS["loss"]["beta"] = 1.0
    yield lambda model, x: model(x).sum() * SETTINGS["loss"]["beta"]
    SETTINGS["loss"]["beta"] = 2.0


def a_missing_key() -> Iterator[Loss]:
    settings: dict[str, float] = {}
    yield lambda model, x: model(x).sum() * settings.get("beta", 1.0)
    settings["beta"] = 2.0


def a_closure() -> Iterator[Loss]:
    beta = 1.0
    yield lambda model, x: model(x).sum() * beta
    beta = 2.0


def a_nested_function() -> Iterator[Loss]:
    beta = 1.0

    def weighted(y: Tensor) -> Tensor:
        def factor() -> float:
            return beta

        return y.sum() * factor()

    yield lambda model, x: weighted(model(x))
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


def a_list_in_a_class() -> Iterator[Loss]:
    class Config:
        weights = [1.0]  # noqa: RUF012

    yield lambda model, x: model(x).sum() * Config.weights[0]
    Config.weights[0] = 2.0


def an_attribute_of_a_base_class() -> Iterator[Loss]:
    class Base:
        beta = 1.0

    class Config(Base):
        pass

    config = Config()
    yield lambda model, x: model(x).sum() * config.beta
    Base.beta = 2.0


def an_attribute_that_hides_that_of_the_class() -> Iterator[Loss]:
    class Config:
        beta = 1.0

    config = Config()
    yield lambda model, x: model(x).sum() * config.beta
    config.beta = 2.0


def a_property() -> Iterator[Loss]:
    class Schedule:
        epoch = 0

        @property
        def beta(self) -> float:
            return 1.0 + self.epoch

    schedule = Schedule()
    yield lambda model, x: model(x).sum() * schedule.beta
    schedule.epoch += 1


def slots() -> Iterator[Loss]:
    class Config:
        __slots__ = ("beta",)

    config = Config()
    config.beta = 1.0
    yield lambda model, x: model(x).sum() * config.beta
    config.beta = 2.0


def a_missing_attribute() -> Iterator[Loss]:
    class Config:
        values: ClassVar = {"beta": 1.0}

        def __getattr__(self, name: str) -> float:
            return self.values[name]

    config = Config()
    yield lambda model, x: model(x).sum() * config.beta
    Config.values["beta"] = 2.0


def has_attribute() -> Iterator[Loss]:
    config = types.SimpleNamespace()
    yield lambda model, x: model(x).sum() * (2.0 if hasattr(config, "beta") else 1.0)
    config.beta = 2.0


def a_dataclass() -> Iterator[Loss]:
    @dataclasses.dataclass
    class Config:
        beta: float = 1.0

    config = Config()
    yield lambda model, x: model(x).sum() * config.beta
    config.beta = 2.0


def a_frozen_dataclass_made_anew() -> Iterator[Loss]:
    @dataclasses.dataclass(frozen=True)
    class Config:
        beta: float = 1.0

    held = {"config": Config()}
    yield lambda model, x: model(x).sum() * held["config"].beta
    held["config"] = Config(2.0)


def an_enum() -> Iterator[Loss]:
    class Mode(enum.Enum):
        SUM = 1
        SQUARES = 2

    state = types.SimpleNamespace(mode=Mode.SUM)
    yield lambda model, x: (model(x) if state.mode is Mode.SUM else model(x).square()).sum()
    state.mode = Mode.SQUARES


def a_module_of_settings() -> Iterator[Loss]:
    settings = types.ModuleType("settings")
    settings.beta = 1.0
    sys.modules["settings"] = settings
    yield lambda model, x: model(x).sum() * settings.beta
    settings.beta = 2.0


def an_import_inside() -> Iterator[Loss]:
    settings = types.ModuleType("settings_inside")
    settings.beta = 1.0
    sys.modules["settings_inside"] = settings

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        import settings_inside  # type: ignore[import-not-found]

        return model(x).sum() * settings_inside.beta

    yield loss
    settings.beta = 2.0


def a_partial() -> Iterator[Loss]:
    weights = [1.0]

    def weighted(weights: list[float], model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum() * weights[0]

    yield functools.partial(weighted, weights)
    weights[0] = 2.0


def a_default() -> Iterator[Loss]:
    def loss(model: nn.Module, x: Tensor, weights: Any = [1.0]) -> Tensor:  # noqa: B006
        return model(x).sum() * weights[0]

    yield loss
    loss.__defaults__[0][0] = 2.0  # type: ignore[index]


def an_attribute_of_a_function() -> Iterator[Loss]:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum() * loss.beta  # type: ignore[attr-defined]

    loss.beta = 1.0  # type: ignore[attr-defined]
    yield loss
    loss.beta = 2.0  # type: ignore[attr-defined]


def a_callable_object() -> Iterator[Loss]:
    class Criterion:
        beta = 1.0

        def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
            return model(x).sum() * self.beta

    criterion = Criterion()
    yield criterion
    criterion.beta = 2.0


def a_static_and_a_class_method() -> Iterator[Loss]:
    class Config:
        beta = 1.0

        @classmethod
        def factor(cls) -> float:
            return cls.beta

        @staticmethod
        def loss(y: Tensor) -> Tensor:
            return y.sum() * Config.factor()

    yield lambda model, x: Config.loss(model(x))
    Config.beta = 2.0


def a_module_that_is_a_criterion() -> Iterator[Loss]:
    criterion = nn.HuberLoss(delta=1.0)
    yield lambda model, x: criterion(model(x), x)
    criterion.delta = 0.1


def the_mode_of_a_teacher() -> Iterator[Loss]:
    teacher = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    yield lambda model, x: (model(x) - teacher(x)).sum()
    teacher.eval()


def a_probability_of_dropout() -> Iterator[Loss]:
    drop = nn.Dropout(0.5)
    yield lambda model, x: drop(model(x)).sum()
    drop.p = 0.1


def a_layer_put_in() -> Iterator[Loss]:
    net = nn.Sequential(nn.Linear(4, 4))
    yield lambda model, x: (model(x) + net(x)).sum()
    net.append(nn.Tanh())


def a_forward_put_in_its_place() -> Iterator[Loss]:
    net, other = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)
    yield lambda model, x: (model(x) + net(x)).sum()
    net[0].forward = other.forward  # type: ignore[method-assign]


def a_hook_put_in() -> Iterator[Loss]:
    net = nn.Sequential(nn.Linear(4, 4))
    yield lambda model, x: (model(x) + net(x)).sum()
    net[0].register_forward_hook(lambda module, inputs, output: output * 2)


def a_frozen_teacher() -> Iterator[Loss]:
    teacher = nn.Linear(4, 4)
    yield lambda model, x: (model(x) - teacher(x)).sum()
    teacher.weight.requires_grad_(False)


def a_teacher_in_another_dtype() -> Iterator[Loss]:
    teacher = nn.Linear(4, 4)
    yield lambda model, x: (model(x) - teacher(x.to(teacher.weight.dtype))).sum()
    teacher.double()


def a_frozen_weight_in_a_dict() -> Iterator[Loss]:
    held = {"weight": torch.ones(4, requires_grad=True)}
    yield lambda model, x: (model(x) * held["weight"]).sum()
    held["weight"].requires_grad_(False)


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


def a_number_of_an_array() -> Iterator[Loss]:
    weights = np.ones(4, dtype=np.float32)
    yield lambda model, x: model(x).sum() * float(weights[1])
    weights[1] = 3.0


def a_number_of_an_array_of_python() -> Iterator[Loss]:
    numbers = array.array("d", [1.0])
    yield lambda model, x: model(x).sum() * numbers[0]
    numbers[0] = 2.0


def a_number_of_numpy() -> Iterator[Loss]:
    held = [np.float64(1.0)]
    yield lambda model, x: model(x).sum() * float(held[0])
    held[0] = np.float64(2.0)


def an_environment_variable() -> Iterator[Loss]:
    os.environ["WHOLEBATCH_TEST_BETA"] = "1.0"
    yield lambda model, x: model(x).sum() * float(os.environ["WHOLEBATCH_TEST_BETA"])
    os.environ["WHOLEBATCH_TEST_BETA"] = "2.0"


def getenv() -> Iterator[Loss]:
    os.environ["WHOLEBATCH_TEST_BETA"] = "1.0"
    yield lambda model, x: model(x).sum() * float(os.getenv("WHOLEBATCH_TEST_BETA", "1"))
    os.environ["WHOLEBATCH_TEST_BETA"] = "2.0"


def getenv_by_its_own_name() -> Iterator[Loss]:
    os.environ.pop("WHOLEBATCH_TEST_BETA", None)
    yield lambda model, x: model(x).sum() * float(_getenv("WHOLEBATCH_TEST_BETA", "1"))
    os.environ["WHOLEBATCH_TEST_BETA"] = "2.0"


def the_environment_asked_for_a_name() -> Iterator[Loss]:
    os.environ.pop("WHOLEBATCH_TEST_BETA", None)
    yield lambda model, x: model(x).sum() * (2.0 if "WHOLEBATCH_TEST_BETA" in os.environ else 1.0)
    os.environ["WHOLEBATCH_TEST_BETA"] = "2.0"


def a_file() -> Iterator[Loss]:
    path = Path(f"/tmp/wholebatch-{os.getpid()}.json")
    path.write_text("1.0")
    yield lambda model, x: model(x).sum() * json.loads(path.read_text())
    path.write_text("2.0")


def a_file_that_is_there() -> Iterator[Loss]:
    path = f"/tmp/wholebatch-{os.getpid()}.flag"
    yield lambda model, x: model(x).sum() * (2.0 if os.path.exists(path) else 1.0)
    Path(path).touch()


def the_time() -> Iterator[Loss]:
    yield lambda model, x: model(x).sum() * (1.0 + time.time() % 1)
    time.sleep(0.01)


def the_monotonic_time() -> Iterator[Loss]:
    yield lambda model, x: model(x).sum() * (1.0 + time.perf_counter() % 1)
    time.sleep(0.01)


def random_of_python() -> Iterator[Loss]:
    yield lambda model, x: model(x).sum() * random.choice([1.0, 2.0])


def random_of_numpy() -> Iterator[Loss]:
    yield lambda model, x: model(x).sum() * float(np.random.rand())


def a_generator_of_numpy() -> Iterator[Loss]:
    generator = np.random.default_rng(0)
    yield lambda model, x: model(x).sum() * generator.uniform()


def a_generator_of_python() -> Iterator[Loss]:
    generator = random.Random(0)
    yield lambda model, x: model(x).sum() * generator.random()


def a_generator_of_torch() -> Iterator[Loss]:
    generator = torch.Generator()
    yield lambda model, x: (model(x) + torch.randn(4, generator=generator)).sum()


def an_iterator() -> Iterator[Loss]:
    numbers = iter([1.0, 2.0, 3.0])
    yield lambda model, x: model(x).sum() * next(numbers)
    next(numbers)


def a_count() -> Iterator[Loss]:
    count = itertools.count(1)
    yield lambda model, x: model(x).sum() * next(count)
    next(count)


def a_generator_function() -> Iterator[Loss]:
    numbers = (0.5 * one for one in range(100))
    yield lambda model, x: model(x).sum() * next(numbers)
    next(numbers)


def a_queue() -> Iterator[Loss]:
    queue = collections.deque([1.0, 2.0, 3.0])
    yield lambda model, x: model(x).sum() * queue[0]
    queue.popleft()


def a_counter_in_the_loss() -> Iterator[Loss]:
    state = types.SimpleNamespace(calls=0)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        state.calls += 1
        return model(x).sum() * state.calls

    yield loss


def a_list_that_grows() -> Iterator[Loss]:
    seen: list[int] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(len(x))
        return model(x).sum() * len(seen)

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


def a_cached_function() -> Iterator[Loss]:
    config = types.SimpleNamespace(beta=1.0)

    @functools.lru_cache
    def factor(epoch: int) -> float:
        return config.beta * epoch

    state = types.SimpleNamespace(epoch=1)
    yield lambda model, x: model(x).sum() * factor(state.epoch)
    state.epoch = 2


def a_cached_property() -> Iterator[Loss]:
    class Config:
        @functools.cached_property
        def beta(self) -> float:
            return 1.0

    config = Config()
    assert config.beta == 1.0
    yield lambda model, x: model(x).sum() * config.beta
    vars(config)["beta"] = 2.0


def a_context_variable() -> Iterator[Loss]:
    variable = contextvars.ContextVar("variable", default=1.0)
    yield lambda model, x: model(x).sum() * variable.get()
    variable.set(2.0)


def a_variable_of_the_thread() -> Iterator[Loss]:
    local = threading.local()
    local.beta = 1.0
    yield lambda model, x: model(x).sum() * local.beta
    local.beta = 2.0


def a_weak_reference() -> Iterator[Loss]:
    class Config:
        beta = 1.0

    config = Config()
    config.beta = 1.0
    reference = weakref.ref(config)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        at = reference()
        assert at is not None
        return model(x).sum() * at.beta

    yield loss
    config.beta = 2.0


def the_rate_of_an_optimizer() -> Iterator[Loss]:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    yield lambda model, x: model(x).sum() * optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 0.2


def the_last_rate_of_a_scheduler() -> Iterator[Loss]:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    yield lambda model, x: model(x).sum() * scheduler.get_last_lr()[0]
    optimizer.step()
    scheduler.step()


def the_epoch_of_a_scheduler() -> Iterator[Loss]:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    yield lambda model, x: model(x).sum() * (1.0 if scheduler.last_epoch < 1 else 2.0)
    optimizer.step()
    scheduler.step()


def a_hook_on_a_tensor() -> Iterator[Loss]:
    config = types.SimpleNamespace(scale=1.0)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        y.register_hook(lambda gradient: gradient * config.scale)
        return y.sum()

    yield loss
    config.scale = 2.0


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


def a_function_put_in_its_place() -> Iterator[Loss]:
    held = {"activation": F.relu}
    yield lambda model, x: held["activation"](model(x)).sum()
    held["activation"] = F.gelu


def the_length_of_a_list() -> Iterator[Loss]:
    tasks = ["a", "b"]
    yield lambda model, x: model(x).sum() / len(tasks)
    tasks.append("c")


def an_order_of_a_dictionary() -> Iterator[Loss]:
    weights = {"a": 1.0, "b": 2.0}
    yield lambda model, x: model(x).sum() * next(iter(weights.values()))
    weights["a"] = weights.pop("a")


def a_set() -> Iterator[Loss]:
    frozen = {"head"}
    yield lambda model, x: model(x).sum() * (2.0 if "trunk" in frozen else 1.0)
    frozen.add("trunk")


def a_named_tuple() -> Iterator[Loss]:
    kind = collections.namedtuple("kind", ["beta"])
    held = [kind(1.0)]
    yield lambda model, x: model(x).sum() * held[0].beta
    held[0] = kind(2.0)


def a_value_in_the_middle_of_a_long_list() -> Iterator[Loss]:
    values = [1.0] * 3000
    state = types.SimpleNamespace(at=2500)
    yield lambda model, x: model(x).sum() * values[state.at]
    values[2500] = 2.0


def arithmetic_of_a_value() -> Iterator[Loss]:
    state = types.SimpleNamespace(step=0)
    yield lambda model, x: model(x).sum() * (0.5 + 0.5 * math.cos(math.pi * state.step / 100))
    state.step = 50


def a_user_dictionary() -> Iterator[Loss]:
    config = collections.UserDict(beta=1.0)
    yield lambda model, x: model(x).sum() * config["beta"]
    config["beta"] = 2.0


def a_chain_of_dictionaries() -> Iterator[Loss]:
    config = collections.ChainMap({}, {"beta": 1.0})
    yield lambda model, x: model(x).sum() * config["beta"]
    config["beta"] = 2.0


def gradients_are_off() -> Iterator[Loss]:
    state = types.SimpleNamespace(detaches=False)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not state.detaches):
            y = model(x)
        return (y + model(x)).sum()

    yield loss
    state.detaches = True


def a_descriptor() -> Iterator[Loss]:
    class Value:
        now = 1.0

        def __get__(self, owner: object, kind: type) -> float:
            return self.now

    class Config:
        beta = Value()

    config = Config()
    yield lambda model, x: model(x).sum() * config.beta
    vars(Config)["beta"].now = 2.0


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
    "the_dictionary_of_globals": "line .*globals",
    "a_number_of_an_array_of_python": "line .*numbers",
    "a_file": "line .*read_text",
    "a_file_that_is_there": "Dynamo cannot follow",
    "the_time": "line .*time.time",
    "the_monotonic_time": "line .*perf_counter",
    "random_of_python": "line .*random.choice",
    "random_of_numpy": "line .*np.random.rand",
    "a_generator_of_numpy": "line .*generator.uniform",
    "a_generator_of_python": "it changes generator|random_value",
    "a_generator_of_torch": "line .*generator=generator",
    "an_iterator": "line .*next",
    "a_count": "it changes count|line .*next",
    "a_generator_function": "line .*next",
    "a_counter_in_the_loss": "(line|it changes) .*state.calls",
    "a_list_that_grows": "it changes seen",
    "a_list_of_tensors_that_grows": "it changes outputs",
    "where_a_tensor_lies": "reads storage_offset",
    "a_tensor_that_the_loss_writes": "it changes total",
    **({"a_context_variable": "line .*variable.get"} if torch.__version__ < (2, 15) else {}),
    "the_last_rate_of_a_scheduler": "line .*get_last_lr",
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
