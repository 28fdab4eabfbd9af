"""Out of memory at every operation of an optimizer's step: undone, or said what is left of it."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import wholebatch as wb
from tests.support import samples, summed
from wholebatch.memory.meter import MemoryMeter
from wholebatch.options import grouped
from wholebatch.window import gradient_store as ahead

Make = Callable[..., torch.optim.Optimizer]
Makes = Callable[[nn.Module], list[torch.optim.Optimizer]]


def adam(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, **options)


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, amsgrad=True, **options)


def momentum(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1, **options)


def adagrad(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1, **options)


_MAKE_NOTHING = (
    "__get__",
    "_record_function_enter_new",
    "_set_grad_enabled",
    "is_complex",
    "is_floating_point",
    "item",
)


class OutOfMemoryAt(TorchFunctionMode):
    """Raises torch.OutOfMemoryError instead of the n-th operation (from 0) of an optimizer.

    Not a dispatch mode: below one, torch does not count the changes of foreach operations.
    """

    def __init__(self, n: int | None = None) -> None:
        super().__init__()
        self.n = n
        self.seen = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.__name__ not in _MAKE_NOTHING:
            self.seen += 1
            if self.n is not None and self.seen == self.n + 1:
                raise torch.OutOfMemoryError(f"injected at {func.__name__}")
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _steps_pass_for_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps that fail here stand for torch's own, and take the factor as those do."""
    monkeypatch.setattr("wholebatch.window.close._is_torchs_code", lambda function: True)


WAYS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "single": {"foreach": False}}


class Run:
    """A model, its optimizer, and windows of one micro-batch; a step may be made to fail."""

    def __init__(self, make: Makes, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        self.context: BaseException | None = None
        self.optimizers = make(self.model)
        self.windows = wb.Accumulator(self.model, self.optimizers, steps=1, **grouped(options))

    def step(self, window: int) -> None:
        batch = samples(6 + window, dtype=torch.float32)
        self.windows.backward(summed(self.model, batch), units=6 + window)

    def fail(self, window: int, failure: OutOfMemoryAt) -> str | None:
        """A window in whose optimizer step this happens; the error, if it led to one."""
        steps = [optimizer.step for optimizer in self.optimizers]
        for optimizer, real in zip(self.optimizers, steps, strict=True):

            def step(closure: Any = None, real: Any = real) -> None:
                with failure:
                    real()

            optimizer.step = step  # type: ignore[method-assign, assignment]
        try:
            self.step(window)
        except torch.OutOfMemoryError as error:
            self.context = error.__context__
            return str(error)
        finally:
            for optimizer in self.optimizers:
                del optimizer.step  # type: ignore[method-assign]
        return None

    def saved(self) -> tuple[Any, ...]:
        return copy.deepcopy(
            (self.model.state_dict(), *(one.state_dict() for one in self.optimizers))
        )

    def load(self, saved: tuple[Any, ...]) -> None:
        model, *optimizers = copy.deepcopy(saved)
        self.model.load_state_dict(model)
        for optimizer, state in zip(self.optimizers, optimizers, strict=True):
            optimizer.load_state_dict(state)


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [part for name, one in value.items() for part in (name, *flat(one))]
    if isinstance(value, list | tuple):
        return [part for one in value for part in flat(one)]
    return [value.tolist() if isinstance(value, Tensor) else value]


def same(a: Any, b: Any) -> bool:
    return flat(a) == flat(b)


def sweep(make: Makes, window: int, **options: Any) -> list[str]:
    """Fail at every operation of this window's step, and go on as each error says; the errors."""
    right, before = Run(make, **options), Run(make, **options)
    for earlier in range(window):
        right.step(earlier)
        before.step(earlier)
    whole = OutOfMemoryAt()
    assert right.fail(window, whole) is None
    right.step(window + 1)
    errors = []
    for n in range(whole.seen):
        run = Run(make, **options)
        for earlier in range(window):
            run.step(earlier)
        error = run.fail(window, OutOfMemoryAt(n))
        assert error is not None
        assert "(injected at " in error
        assert run.context is None  # its traceback would hold what was allocated
        errors.append(error)
        if "the run can go on" in error:
            assert same(run.saved(), before.saved()), error
        else:
            found = re.search(r"changed (\d) of 4 parameters", error)
            pairs = zip(run.model.parameters(), before.model.parameters(), strict=True)
            changed = sum(not torch.equal(a, b) for a, b in pairs)
            assert changed == (int(found[1]) if found else changed)
            assert "load the model and the optimizer from the last checkpoint" in error
            with pytest.raises(wb.errors.WindowError, match="from the last checkpoint"):
                run.step(window)
            run.load(before.saved())
        assert all(parameter.grad is None for parameter in run.model.parameters())
        run.step(window)
        run.step(window + 1)
        assert same(run.saved(), right.saved()), (n, error)
    return errors


def undone(errors: list[str]) -> int:
    return sum("the run can go on" in error for error in errors)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [adam, adamw, momentum])
def test_every_operation_of_the_first_step(make: Make, way: str) -> None:
    errors = sweep(lambda model: [make(model.parameters(), **WAYS[way])], 0)
    kept = undone(errors)
    assert kept == len(list(itertools.takewhile(lambda error: "can go on" in error, errors)))
    # Of four parameters: Adam makes three tensors of state, with amsgrad four; the other steps
    # that change no parameter are those before the first in-place operation on one.
    made = {adam: 12, adamw: 16, momentum: 4}[make]
    beyond = {
        (adam, "foreach"): 9,  # all but the end: the parameters are changed last
        (adam, "fused"): 2,
        (adam, "single"): 8,
        (adamw, "foreach"): 3,  # weight decay changes the parameters first
        (adamw, "fused"): 2,
        (adamw, "single"): 2,
    }
    assert kept >= made
    assert (make, way) not in beyond or kept == made + beyond[make, way]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [adam, momentum, adagrad])
def test_every_operation_of_a_later_step(make: Make, way: str) -> None:
    errors = sweep(lambda model: [make(model.parameters(), **WAYS[way])], 2)
    assert (
        undone(errors)
        == {
            ("adam", "foreach"): 2,
            ("adam", "fused"): 1,  # the count of steps comes first, and is all that is counted
            ("adam", "single"): 1,
            ("momentum", "foreach"): 2,  # a copy of the gradients, for the weight decay
            ("momentum", "fused"): 0,  # it counts nothing
            ("momentum", "single"): 2,
            ("adagrad", "foreach"): 2,
            ("adagrad", "fused"): 1,
            ("adagrad", "single"): 1,
        }[make.__name__, way]
    )


@pytest.mark.parametrize("way", ["foreach", "fused"])
@pytest.mark.parametrize("make", [adam, momentum])
def test_groups_and_optimizers_one_after_the_other(make: Make, way: str) -> None:
    def grouped(model: nn.Module) -> list[torch.optim.Optimizer]:
        groups = [{"params": [*layer.parameters()]} for layer in (model[0], model[2])]
        return [make(groups, **WAYS[way])]

    def apart(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [make(model[0].parameters(), **WAYS[way]), make(model[2].parameters(), **WAYS[way])]

    for both in (grouped, apart):
        errors = sweep(both, 0)
        kept = undone(errors)
        assert kept < len(errors) / 2 + 1  # the second cannot undo the first
        assert kept >= 6 or make is momentum


def test_optimizer_state_on_the_host() -> None:
    errors = sweep(lambda model: [adam(model.parameters())], 0, optimizer_state="host")
    assert undone(errors) >= 12


def test_a_close_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ahead.can_close_ahead
    monkeypatch.setattr(
        "wholebatch.window.gradient_store.can_close_ahead",
        lambda optimizers, options, device: real(optimizers, options, torch.device("cuda")),
    )
    for window in (0, 1):
        errors = sweep(lambda model: [adam(model.parameters(), fused=True)], window)
        assert undone(errors) > 0
        assert "may have changed" in errors[-1]


def test_what_does_not_count_its_changes_is_not_trusted() -> None:
    class Own(torch.optim.SGD):
        pass

    run = Run(lambda model: [Own(model.parameters(), lr=0.1)])
    error = run.fail(0, OutOfMemoryAt(0))
    assert error is not None
    assert "may have changed" in error

    run = Run(lambda model: [adam(model.parameters(), foreach=True)])
    with MemoryMeter(model=run.model):
        error = run.fail(0, OutOfMemoryAt(3))
    assert error is not None
    assert "may have changed" in error


def test_other_ranks_may_have_made_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(lambda model: [adam(model.parameters())])
    store = run.windows._window.store
    before = store.before_step()
    monkeypatch.setattr(store, "sync", SimpleNamespace(ranks=2))
    with pytest.raises(torch.OutOfMemoryError, match="other ranks may have made theirs"):
        store.failed_in_step(before, "")
