"""How a lock-step run behaves: order, randomness, failures, ranks, and what it leaves behind."""

from __future__ import annotations

import _thread
import copy
import signal
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.coupled.networks import resnet
from tests.coupled.windows import Dropped, batch, error, lockstep, result, split, total, whole
from wholebatch.coupled.batchnorm.lock_step import LockStep
from wholebatch.errors import UnsupportedError, WindowError


def _party_threads() -> list[str]:
    """Threads of lock-step that are still there; those of other tests' libraries do not count."""
    return [thread.name for thread in threading.enumerate() if "micro-batch" in thread.name]


def test_random_streams_are_deterministic_and_advance_the_callers() -> None:
    micros = split(batch(6), [2, 2, 2])
    runs = []
    for parts in (micros, micros, micros[:2]):
        torch.manual_seed(5)
        model = Dropped("kept").double()
        before = torch.get_rng_state()
        gradients = lockstep(model, parts)[0]
        assert not torch.equal(torch.get_rng_state(), before)
        runs.append((gradients, torch.get_rng_state()))
    assert all(torch.equal(runs[0][0][n], runs[1][0][n]) for n in runs[0][0])
    # However many micro-batches there are, the caller's stream goes on from the same place.
    assert torch.equal(runs[0][1], runs[2][1])


def test_hooks_results_and_order() -> None:
    model = resnet().double()
    hooked: list[int] = []
    model[0][0][1].register_forward_hook(lambda m, args, out: hooked.append(len(out)))
    order: list[tuple[str, int]] = []

    def forward(micro: tuple[Tensor, Tensor]) -> tuple[int, Tensor]:
        order.append(("forward", len(micro[1])))
        return len(micro[1]), total(model, micro)

    def backward(pair: tuple[int, Tensor]) -> int:
        order.append(("backward", pair[0]))
        pair[1].backward()
        return pair[0]

    step = LockStep(model)
    sizes = [3, 1, 4]
    out = step.run(split(batch(8), sizes), forward=forward, backward=backward)
    assert out == sizes
    assert hooked == sizes
    assert order == [(kind, size) for kind in ("forward", "backward") for size in sizes]
    assert step.run([], forward=forward, backward=backward) == []


def test_model_is_left_as_found() -> None:
    model = resnet().double()
    layer = model[0][0][1]
    own = layer.forward
    data = batch(4)
    want = whole(model, data)
    wrapper = layer.forward = lambda x: own(x) * 1.0  # as libraries do that hook into modules
    found = [m.__dict__.keys() for m in model.modules()]
    got = lockstep(model, split(data, [2, 2]))
    assert error(got[0], want[0]) <= 1e-12
    assert [m.__dict__.keys() for m in model.modules()] == found
    assert layer.__dict__["forward"] is wrapper
    assert not _party_threads()


def test_another_way_through_the_batchnorms_is_refused() -> None:
    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return (self.left if len(x) > 2 else self.right)(x).flatten(1)[:, :5]

    with pytest.raises(UnsupportedError, match="micro-batch 1 came to BatchNorm 'right' where"):
        lockstep(Forked().double(), split(batch(5), [3, 2]))


@pytest.mark.parametrize("sizes", [[3, 2], [2, 3]])
def test_another_number_of_batchnorms_is_refused(sizes: list[int]) -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return (self.bn(x) if len(x) > 2 else x).flatten(1)[:, :5]

    model = nn.Sequential(nn.Conv2d(3, 3, 1), Skipping()).double()
    with pytest.raises(UnsupportedError, match=r"the end of its pass.*'1\.bn'|'1\.bn'.*end"):
        lockstep(model, split(batch(5), sizes))


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_failure_ends_all_and_restores(
    failing: int, where: str, kind: type[BaseException]
) -> None:
    model = resnet().double()
    state = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    failure = kind("mine")

    def fail(*args: object) -> None:
        raise failure

    def forward(pair: tuple[int, tuple[Tensor, Tensor]]) -> Tensor:
        value = total(model, pair[1])
        if pair[0] == failing:
            if where == "forward":
                fail()
            value.register_hook(fail)
        return value

    micros = list(enumerate(split(batch(6), [2, 2, 2])))
    with pytest.raises(kind) as raised:
        LockStep(model).run(micros, forward=forward, backward=lambda v: v.backward())
    assert raised.value is failure
    assert not _party_threads()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert "forward" not in model[0][0][1].__dict__


def test_interrupt_of_the_caller_ends_the_threads() -> None:
    model = resnet().double()
    calls: list[int] = []

    def forward(micro: tuple[Tensor, Tensor]) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            _thread.interrupt_main()
        return total(model, micro)

    # A process that was started in the background ignores interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            LockStep(model).run(
                split(batch(64), [1] * 64), forward=forward, backward=lambda v: v.backward()
            )
    finally:
        signal.signal(signal.SIGINT, before)
    assert not _party_threads()


def test_backward_outside_of_the_run_is_refused() -> None:
    model = resnet().double()
    values = LockStep(model).run(
        split(batch(4), [2, 2]), forward=lambda m: total(model, m), backward=lambda value: value
    )
    with pytest.raises(WindowError, match="outside of the run"):
        values[0].backward()


def test_one_value_per_channel_is_an_error_as_in_torch() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    x, y = torch.randn(1, 3), torch.zeros(1, dtype=torch.long)
    with pytest.raises(ValueError, match="one value per channel"):
        lockstep(model, [(x, y)])


def test_reduce_includes_other_ranks() -> None:
    """Two ranks played one after the other: what rank 0 leaves is added to what rank 1 brings."""
    model = resnet().double()
    data = batch(10)
    want = whole(model, data)
    micros = split(data, [3, 2, 1, 4])
    ranks = [copy.deepcopy(model) for _ in range(2)]
    barrier = threading.Barrier(2)
    brought: list[Tensor | None] = [None, None]
    failures: list[BaseException] = []

    def reduce_of(rank: int) -> Any:
        def reduce(value: Tensor) -> Tensor:
            brought[rank] = value
            barrier.wait(30)
            both = [b for b in brought if b is not None]
            barrier.wait(30)
            return both[0] + both[1]

        return reduce

    def play(rank: int) -> None:
        mine = ranks[rank]
        try:
            LockStep(mine, reduce=reduce_of(rank)).run(
                micros[:3] if rank == 0 else micros[3:],
                forward=lambda m: total(mine, m),
                backward=lambda v: v.backward(),
            )
        except BaseException as failure:
            failures.append(failure)
            barrier.abort()

    other = threading.Thread(target=play, args=(1,))
    other.start()
    play(0)
    other.join()
    assert not failures
    grads = [result(rank)[0] for rank in ranks]
    assert error({n: grads[0][n] + grads[1][n] for n in grads[0]}, want[0]) <= 1e-12
    for rank in ranks:
        assert error(result(rank)[1], want[1]) <= 1e-12


def test_operations_with_a_state_per_thread_run_on_the_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on CUDA: convolutions and products are handed over, autocast and gradients stay right."""
    monkeypatch.setattr(LockStep, "_has_thread_state", lambda self: True)
    seen: dict[str, set[str]] = {}

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.setdefault(threading.current_thread().name, set()).add(func.__name__)
            return func(*args, **(kwargs or {}))

    model = resnet().double()
    data = batch(9)
    want = whole(model, data)
    with Spy():
        got = lockstep(model, split(data, [4, 4, 1]))
    assert error(got[0], want[0]) <= 1e-12
    assert error(got[1], want[1]) <= 1e-12
    assert {"convolution.default", "convolution_backward.default"} <= seen["MainThread"]

    exact = resnet().double()
    model = copy.deepcopy(exact).float()
    low = (data[0].float(), data[1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        own = whole(model, low)[0]
        got = lockstep(model, split(low, [5, 4]))
    reference = whole(exact, data)[0]
    assert error(got[0], reference) <= 1.25 * error(own, reference)


class Mixed(nn.Module):
    """Every kind of layer that is handed over, and some that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1, groups=1)
        self.b = nn.Conv2d(4, 4, 3, padding="same")
        self.c = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")
        self.d = nn.ConvTranspose2d(4, 4, 3, stride=2, output_padding=1)
        self.e = nn.Conv1d(4, 4, 3, groups=2, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(4))
        self.last = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip((self.a, self.b, self.c, self.d), self.norms, strict=True):
            x = torch.tanh(norm(layer(x)))
        x = self.last(self.e(x.flatten(2)))
        return self.head(x.transpose(1, 2)).mean(1)


@pytest.mark.parametrize("hold", ["graphs", "inputs"])
def test_layers_have_their_kernels_run_on_the_callers_thread(
    monkeypatch: pytest.MonkeyPatch, hold: Any
) -> None:
    monkeypatch.setattr(LockStep, "_has_thread_state", lambda self: True)
    model = Mixed().double()
    model.a.weight.requires_grad_(False)
    data = batch(7)
    want = whole(model, data)
    blocks = [("d", model.d), ("last", model.last)]
    step = LockStep(model, hold=hold, blocks=blocks)
    threads: set[str] = set()
    convolution = torch.convolution

    def spied(*args: Any) -> Any:
        threads.add(threading.current_thread().name)
        return convolution(*args)

    monkeypatch.setattr(torch, "convolution", spied)
    step.run(
        split(data, [3, 3, 1]),
        forward=lambda micro: total(model, micro),
        backward=lambda value: value.backward(),
    )
    assert threads == {"MainThread"}
    assert error(result(model)[0], want[0]) <= 1e-12
    assert error(result(model)[1], want[1]) <= 1e-12
    assert "forward" not in model.a.__dict__


@pytest.mark.parametrize("hold", ["graphs", "inputs", "host"])
def test_handed_over_layers_cast_as_autocast_does(
    monkeypatch: pytest.MonkeyPatch, hold: Any
) -> None:
    monkeypatch.setattr(LockStep, "_has_thread_state", lambda self: True)
    exact = Mixed().double()
    data = batch(8)
    reference = whole(exact, data)[0]
    model = copy.deepcopy(exact).float()
    low = (data[0].float(), data[1])
    types: list[torch.dtype] = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        own = error(whole(model, low)[0], reference)
        model.d.register_forward_hook(lambda m, args, out: types.append(out.dtype))
        blocks = [("d", model.d), ("last", model.last)]
        LockStep(model, hold=hold, blocks=blocks, least_page=64).run(
            split(low, [5, 3]),
            forward=lambda micro: total(model, micro),
            backward=lambda value: value.backward(),
        )
    assert types[:2] == [torch.bfloat16] * 2
    assert 1e-4 < error(result(model)[0], reference) <= 1.25 * own


def test_a_cast_weight_that_the_last_micro_batch_does_not_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients of all micro-batches are summed for the last; what it does not use is not lost."""
    monkeypatch.setattr(LockStep, "_has_thread_state", lambda self: True)

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)
            self.always, self.twice, self.never = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.always(self.norm(x))
            return self.twice(torch.relu(self.twice(x))) if len(x) > 2 else x

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().square().sum()

    model = Sometimes()
    x = torch.randn(8, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        LockStep(model).run(
            list(x.split([3, 3, 2])), forward=lambda m: loss(model, m), backward=Tensor.backward
        )
    want = copy.deepcopy(model).double()
    want.zero_grad()
    normed = want.norm(x.double())
    for rows in normed.split([3, 3, 2]):
        out = want.always(rows)
        if len(rows) > 2:
            out = want.twice(torch.relu(want.twice(out)))
        out.square().sum().backward(retain_graph=True)
    assert model.never.weight.grad is None
    gradients = result(model)[0]
    assert gradients["twice.weight"].dtype == torch.float32
    assert error(gradients, result(want)[0]) <= 0.02


def test_failure_on_the_callers_thread_is_the_party_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LockStep, "_has_thread_state", lambda self: True)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(7, 5))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        lockstep(model.double(), split(batch(4), [2, 2]))
    assert not _party_threads()


def test_a_second_derivative_is_refused() -> None:
    model = resnet().double()

    def backward(value: Tensor) -> None:
        torch.autograd.grad(value, list(model.parameters()), create_graph=True)

    with pytest.raises(UnsupportedError, match="a second derivative"):
        LockStep(model).run(
            split(batch(4), [2, 2]), forward=lambda m: total(model, m), backward=backward
        )
