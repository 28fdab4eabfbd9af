"""A window in a loop that is somebody else's."""

from __future__ import annotations

from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import wholebatch as wb
from tests.distributed.launch import reports
from tests.support import EXACT, Whole, distance, mean, mlp, pieces, samples
from wholebatch.errors import EmptyWindowError, LossError, OptionError, StateError, WindowError
from wholebatch.integrations.host_window import AdapterOptions, FirstLook, HostEngine, HostWindows
from wholebatch.stream import GivenLoss
from wholebatch.window.close import read_scalars

CPU = torch.device("cpu")


def run(window: HostWindows, model: nn.Module, micros: Any, divided_by: float = 1.0) -> None:
    for micro in micros:
        loss = mean(model, micro)
        window.weigh(GivenLoss.of(mean=loss, units=len(micro["y"])))
        with window.host_backward():
            (loss / divided_by).backward()


@pytest.mark.parametrize("sizes", [[12], [6, 6], [1, 4, 7], [11, 1]])
@pytest.mark.parametrize("divided_by", [1, 3, 7])
def test_gradients_are_those_of_the_undivided_batch(sizes: list[int], divided_by: int) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    window = HostWindows([model], [optimizer], device=CPU, divided_by=lambda: divided_by)
    whole = Whole(model)
    for _ in range(2):  # the second begins with the seed of the first
        run(window, model, pieces(samples(12), sizes), divided_by)
        settled = window.settle()
        optimizer.step()
        optimizer.zero_grad()
        loss = whole.step(samples(12))
        assert settled is not None
        assert settled.loss == pytest.approx(loss, rel=1e-12)
        assert (settled.units, settled.micro_batches) == (12, len(sizes))
    whole.assert_same(model)


def test_a_window_goes_on_after_its_state_was_saved() -> None:
    model, again = mlp(), mlp()
    first = HostWindows([model], [], device=CPU)
    parts = pieces(samples(12), [5, 4, 3])
    run(first, model, parts[:1])
    second = HostWindows([again], [], device=CPU)
    second.load_state_dict(first.state_dict())
    run(second, again, parts[1:])
    second.settle()
    whole = Whole(mlp())
    whole.step(samples(12))
    torch.optim.SGD(again.parameters(), lr=0.1).step()
    whole.assert_same(again)


def test_a_state_with_gradients_goes_to_the_model_that_saved_it() -> None:
    model, again = mlp(), mlp()
    first, second = HostWindows([model], [], device=CPU), HostWindows([again], [], device=CPU)
    run(first, model, [samples(5)])
    saved = first.state_dict()
    other = HostWindows([again[0]], [], device=CPU)
    with pytest.raises(StateError, match="load it into the same model and optimizer"):
        other.load_state_dict(saved)
    second.load_state_dict(saved)
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


def test_a_loss_of_16_bits_is_totalled_in_32() -> None:
    weight = torch.nn.Parameter(torch.ones((), dtype=torch.float16))
    window = HostWindows([], [torch.optim.SGD([weight])], device=CPU)
    loss = weight * 8.0
    window.weigh(GivenLoss.of(mean=loss, units=10_000))  # 80,000 is beyond float16
    with window.host_backward():
        loss.backward()
    settled = window.settle()
    assert settled is not None
    assert settled.loss == 8.0


def test_sparse_gradients_are_settled_too() -> None:
    table = nn.Embedding(5, 2, sparse=True, dtype=torch.float64)
    window = HostWindows([table], [], device=CPU)
    for rows in ([0, 0, 3], [0]):
        loss = table(torch.tensor(rows)).sum(1).mean()
        window.weigh(GivenLoss.of(mean=loss, units=len(rows)))
        with window.host_backward():
            loss.backward()
    window.settle()
    assert table.weight.grad is not None
    assert table.weight.grad.to_dense()[:, 0].tolist() == [0.75, 0, 0, 0.25, 0]


def test_a_first_look_leaves_its_host_as_it_was() -> None:
    class Host:
        def __init__(self) -> None:
            self.metrics: Any = defaultdict(list, {"loss": [1.0]})
            self.seen, self.steps, self.last = {1}, 0, deque([1, 2], maxlen=2)

    host, model = Host(), mlp()
    window = HostWindows([model], [], device=CPU, owns_forward=True)
    look = FirstLook(model, window, host=host, off="audit=False")
    kept = host.metrics["loss"]

    def run(few: Any) -> wb.Loss:
        host.metrics["loss"].append(2.0)
        host.metrics["other"].append(2.0)
        host.seen.add(2)
        host.last.append(3)
        host.steps += 1
        host.added = True  # type: ignore[attr-defined]
        return wb.mean_loss(mean(model, few), len(few["y"]))

    assert look.pending
    look.at(run, samples(8), micro_batch=None, steps=2)
    assert not look.pending
    assert vars(host) == vars(Host())
    assert host.metrics["loss"] is kept
    assert host.last.maxlen == 2


def test_spectral_norm_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    HostWindows([nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))], [], device=CPU)
    assert "one power iteration for every forward" in caplog.text


def test_what_does_not_fit_is_said() -> None:
    model = mlp()
    divisors = [4.0]
    window = HostWindows([model], [], device=CPU, divided_by=lambda: divisors[0])
    with pytest.raises(WindowError, match="no backward was weighed"):
        window.settle()
    with pytest.raises(LossError, match=r"of shape \(3,\)"):
        window.weigh(GivenLoss.of(torch.zeros(3, requires_grad=True) * 1, 3))
    with pytest.raises(LossError, match="does not require a gradient"):
        window.weigh(GivenLoss.of(torch.zeros(()), 3))
    loss = mean(model, samples(2)) * 0
    window.weigh(GivenLoss.of(mean=loss, units=0))
    with window.host_backward():
        loss.backward()
    divisors[0] = 2.0
    with pytest.raises(WindowError, match="divided by 4, this one is by 2"):
        window.weigh(GivenLoss.of(mean=mean(model, samples(2)), units=2))
    with pytest.raises(EmptyWindowError, match="have zero units"):
        window.settle()
    with pytest.raises(StateError, match="not the state of a window"):
        window.load_state_dict({})
    with pytest.raises(OptionError, match="zero_units='maybe'"):
        AdapterOptions(zero_units="maybe")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_that_replicate_or_shard(tmp_path: Path) -> None:
    found = reports(Path(__file__).with_name("hosted_worker.py"), 2, tmp_path)
    rounded = found.pop("bf16")
    kinds = {"ddp", "ddp resumed", "fsdp2", "statistics", "held back"}
    assert set(found) == kinds | {"compiled", "mixed", "own loop"}
    assert max(found.values()) <= EXACT, found
    assert rounded < 1e-4  # 1e-2 where bf16 is added


def test_a_hook_on_a_parameter_sees_the_whole_gradient_once() -> None:
    """One that is not linear would be another function if every micro-batch called it."""
    model, alone = mlp(), mlp()
    seen: list[torch.Tensor] = []

    def clamp(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(gradient)
        return gradient.clamp(-0.01, 0.01)

    for one in (model, alone):
        next(one.parameters()).register_hook(clamp)
    window = HostWindows([model], [], device=CPU)
    run(window, model, pieces(samples(12), [5, 4, 3]))
    window.settle()
    assert len(seen) == 1
    mean(alone, samples(12)).backward()
    ours, whole = ([p.grad for p in one.parameters()] for one in (model, alone))
    assert distance(ours, whole) <= EXACT  # type: ignore[arg-type]
    assert next(model.parameters())._backward_hooks  # they are back


def test_parameters_that_nobody_steps_are_scaled_too() -> None:
    """A host may clip by the norm over all parameters of the model."""
    model, alone = mlp(), mlp()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    window = HostWindows([model], [optimizer], device=CPU)
    run(window, model, pieces(samples(12), [5, 4, 3]))
    window.settle()
    mean(alone, samples(12)).backward()
    ours, whole = ([p.grad for p in one.parameters()] for one in (model, alone))
    assert distance(ours, whole) <= EXACT  # type: ignore[arg-type]


def test_a_scale_that_is_too_large_is_left_to_the_scaler() -> None:
    model = mlp(dtype=torch.float32)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38)

    class Host:
        pass

    host: Any = Host()
    host.scaler = scaler
    window = HostWindows([model], [optimizer], device=CPU, scaled_by=host)
    for micro in pieces(samples(12, dtype=torch.float32), [8, 4]):
        total = 1e6 * mean(model, micro) * len(micro["y"])
        window.weigh(GivenLoss.of(total, len(micro["y"])))
        with window.host_backward():
            scaler.scale(total).backward()  # type: ignore[no-untyped-call]
    assert window.settle() is None
    assert (window.updates, window.skipped) == (0, 1)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < 1e38
    assert all(map(torch.equal, before, model.parameters()))


def test_the_number_of_micro_batches_may_change_between_windows_of_graphs() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = [2]
    window = HostWindows([model], [optimizer], device=CPU, divided_by=lambda: steps[0])
    whole = Whole(model)
    loss = window.compiled(lambda micro: wb.cross_entropy(model(micro["x"]), micro["y"]), "compile")
    loss.executor._plan.compiles = False
    modes = set()
    for number in (2, 2, 2, 3, 1):
        steps[0] = number
        cut = {1: [12], 2: [8, 4], 3: [8, 3, 1]}[number]
        for micro in pieces(samples(12), cut):
            window.take(loss(micro))
            modes.add(loss.executor.mode)
        window.settle()
        optimizer.step()
        optimizer.zero_grad()
        whole.step(samples(12))
    whole.assert_same(model)
    assert "operations" in modes


def test_norm_of_slices_on_a_single_rank_is_a_plain_number() -> None:
    """FSDP2 on one rank: no group to sum over, and yet its gradients are DTensors."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        gradients = [distribute_tensor(torch.full((3,), 2.0), mesh, [Shard(0)]), torch.ones(4)]
        engine = HostEngine([nn.Linear(1, 1)], torch.device("cpu"), "sharded")
        norms = [engine.total_norm(gradients[:1]), engine.total_norm(gradients[1:])]
        assert read_scalars(norms) == [pytest.approx(12**0.5), 2.0]
    finally:
        dist.destroy_process_group()
