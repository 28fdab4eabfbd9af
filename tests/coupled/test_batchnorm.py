"""The policies: each does what its row of the table says, and leaves what it found."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.support import EXACT, Seen, distance
from wholebatch.coupled.batchnorm.policies import Converted, Statistics, choose, convert, groups_for
from wholebatch.coupled.normalisation_layers import batchnorms, tracked_instance_norms
from wholebatch.errors import OptionError, StateError, UnsupportedError


def data(size: int = 10, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, 4, 4, generator=generator, dtype=torch.float64)
    return x * torch.linspace(0.5, 2, size, dtype=torch.float64).view(-1, 1, 1, 1) + 1


def first_layer(**options: Any) -> nn.Module:
    """The norm comes first, so what it sees does not depend on how others normalise."""
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, **options), nn.ReLU()).double()


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def close(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return all(torch.allclose(got[n], want[n], rtol=1e-12, atol=1e-13) for n in want)


def window(model: nn.Module, policy: Any, x: Tensor, sizes: list[int]) -> None:
    policy.begin_window()
    for micro in x.split(sizes):
        model(micro)
        policy.micro()
    policy.end_window()


@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"momentum": 0.3, "affine": False}])
def test_statistics_move_once_per_window(options: dict[str, Any]) -> None:
    model = first_layer(**options)
    reference = copy.deepcopy(model)
    policy = choose("statistics", model)
    for seed in range(3):
        reference(data(seed=seed))
        window(model, policy, data(seed=seed), [5, 2, 3])
        assert close(statistics(model), statistics(reference))


def test_statistics_differ_from_plain_accumulation() -> None:
    model = first_layer()
    reference = copy.deepcopy(model)
    reference(data())
    for micro in data().split([5, 2, 3]):
        model(micro)
    assert not close(statistics(model), statistics(reference))


def test_statistics_normalise_with_the_micro_batch() -> None:
    model = first_layer()
    plain = copy.deepcopy(model)
    choose("statistics", model)
    for micro in data().split([5, 2, 3]):
        assert torch.equal(model(micro), plain(micro))


def test_few_samples_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    for sizes, told in (([5, 2, 3], 1), ([8, 2], 0)):
        caplog.clear()
        model = first_layer()
        policy = choose("statistics", model)
        for _ in range(2):
            window(model, policy, data(), sizes)
        assert caplog.text.count("micro-batches of 5 normalise by themselves") == told


def test_statistics_of_a_reused_layer() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> None:
            self.bn(x)
            self.bn(x.square())

    model = Twice().double()
    reference = copy.deepcopy(model)
    reference(data())
    window(model, choose("statistics", model), data(), [4, 4, 2])
    assert close(statistics(model), statistics(reference))
    assert model.bn.num_batches_tracked == 2


def test_statistics_of_an_instance_norm() -> None:
    model = nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True)).double()
    reference = copy.deepcopy(model)
    policy = choose("statistics", model)
    for seed in range(2):
        reference(data(seed=seed))
        window(model, policy, data(seed=seed), [5, 4, 1])
    assert close(statistics(model), statistics(reference))


def test_statistics_count_a_checkpointed_block_once() -> None:
    model = first_layer()
    reference = copy.deepcopy(model)
    reference(data())
    policy = choose("statistics", model)
    policy.begin_window()
    for micro in data().split([5, 5]):
        checkpoint(model, micro, use_reentrant=False).sum().backward()
        policy.micro()
    policy.end_window()
    assert close(statistics(model), statistics(reference))


def test_statistics_of_a_discarded_window_stay() -> None:
    model = first_layer()
    policy = choose("statistics", model)
    before = statistics(model)
    policy.begin_window()
    model(data())
    policy.discard_window()
    policy.end_window()
    assert close(statistics(model), before)


def test_statistics_continue_in_the_middle_of_a_window() -> None:
    model = first_layer()
    reference = copy.deepcopy(model)
    window(reference, choose("statistics", reference), data(), [4, 3, 3])
    policy = choose("statistics", model)
    micros = data().split([4, 3, 3])
    policy.begin_window()
    model(micros[0])
    policy.micro()
    state, weights = policy.state_dict(), model.state_dict()

    resumed = first_layer()
    resumed.load_state_dict(weights)
    continued = choose("statistics", resumed)
    continued.load_state_dict(state)
    for micro in micros[1:]:
        resumed(micro)
        continued.micro()
    continued.end_window()
    want = statistics(reference)
    assert all(torch.equal(value, want[name]) for name, value in statistics(resumed).items())
    with pytest.raises(StateError, match="'9': this model has no such BatchNorm"):
        continued.load_state_dict({"9": []})


def test_statistics_over_ranks() -> None:
    model = first_layer()
    reference = copy.deepcopy(model)
    reference(torch.cat([data(), data()]))
    policy = Statistics(batchnorms(model), reduce=lambda value: 2 * value)  # a rank just like this
    window(model, policy, data(), [6, 4])
    assert close(statistics(model), statistics(reference))


def test_statistics_and_freeze_leave_forward_as_found() -> None:
    for name in ("statistics", "freeze"):
        model = first_layer()
        policy = choose(name, model)
        assert "forward" in model[1].__dict__
        policy.detach()
        assert "forward" not in model[1].__dict__
        model(data())
        assert model[1].num_batches_tracked == 1


def test_an_exception_leaves_buffers_and_momentum() -> None:
    model = first_layer(momentum=0.2)
    choose("statistics", model)
    before = statistics(model)
    with pytest.raises(RuntimeError):
        model[1](torch.zeros(2, 7, 4, 4, dtype=torch.float64))
    assert model[1].momentum == 0.2
    assert close(statistics(model), before)


def test_freeze_runs_in_evaluation_mode_whatever_train_says() -> None:
    model = first_layer()
    model[1].running_mean.fill_(0.7)
    want = copy.deepcopy(model).eval()(data())
    policy = choose("freeze", model)
    model.train()
    before = statistics(model)
    assert torch.equal(model(data()), want)
    assert model[1].training
    assert close(statistics(model), before)
    policy.detach()
    assert not torch.equal(model(data()), want)


def test_freeze_needs_running_statistics() -> None:
    with pytest.raises(UnsupportedError, match="'1' keep no running statistics"):
        choose("freeze", first_layer(track_running_stats=False))


@pytest.mark.parametrize("name", ["group", "layer"])
def test_conversion_keeps_the_parameters_and_splits_exactly(name: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU()).double()
    parameters = list(model.parameters())
    with torch.no_grad():
        model[1].weight.uniform_()
    policy = choose(name, model)
    assert isinstance(policy, Converted)
    assert str(policy) == f"1: GroupNorm({4 if name == 'group' else 1}, 8)"
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    assert not batchnorms(model)
    whole = model(data())
    parts = torch.cat([model(micro) for micro in data().split([3, 7])])
    assert torch.allclose(whole, parts, rtol=1e-13, atol=1e-13)


def test_conversion_of_shared_layers_and_of_layers_without_affine_weights() -> None:
    shared = nn.BatchNorm1d(32, affine=False)
    model = nn.Sequential(nn.Linear(4, 32), shared, nn.Linear(32, 32), shared).eval()
    converted = convert(model, "group")
    assert model[1] is model[3]
    assert not model[1].training
    assert not list(model[1].parameters())
    assert str(converted) == "1: GroupNorm(2, 32)"


def test_conversion_refuses_what_it_cannot_replace() -> None:
    with pytest.raises(UnsupportedError, match="the model itself is a BatchNorm1d"):
        convert(nn.BatchNorm1d(3), "layer")
    with pytest.raises(UnsupportedError, match="'0' is lazy"):
        convert(nn.Sequential(nn.LazyBatchNorm1d()), "group")


def test_sync_converts_and_keeps_parameters() -> None:
    model = first_layer()
    weight = model[1].weight
    choose("sync", model)
    assert isinstance(model[1], nn.SyncBatchNorm)
    assert model[1].weight is weight


@pytest.fixture
def ranks() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sync_is_refused_among_ranks_on_a_cpu(ranks: None) -> None:
    """By every policy that would run it; what the refusal names runs."""
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(first_layer())
    said = r"SyncBatchNorm in '1' on a CPU: torch runs it on GPUs only.*\(batchnorm=\"exact\"\)"
    for policy, model in (("sync", first_layer()), ("sync", synced), ("statistics", synced)):
        with pytest.raises(UnsupportedError, match=f'batchnorm="{policy}" with {said}'):
            choose(policy, model)
    choose("statistics", first_layer())
    whole = copy.deepcopy(first_layer())
    whole.load_state_dict(synced.state_dict())
    (whole(data()).square().sum() / 10).backward()
    for policy in ("freeze", "group", "layer"):
        changed = copy.deepcopy(synced)
        choose(policy, changed)
        changed(data())
    optimizer = torch.optim.SGD(synced.parameters(), lr=1.0)
    seen = Seen(synced, optimizer)
    train = wb.WholeBatch(synced, optimizer, loss=squares, micro_batch=4)
    train.step({"x": data()})
    wanted = [parameter.grad for parameter in whole.parameters()]
    assert distance(seen.gradients[0], wanted) <= EXACT


def squares(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
    return wb.Loss(model(micro["x"]).square().sum(), len(micro["x"]))


@pytest.mark.parametrize("channels", range(1, 130))
def test_groups_divide_the_channels(channels: int) -> None:
    for spatial in (True, False):
        groups = groups_for(channels, spatial=spatial)
        assert channels % groups == 0
        assert groups == 1 or channels // groups >= (2 if spatial else 16)


def test_refuse_names_the_layers() -> None:
    with pytest.raises(UnsupportedError, match=r"BatchNorm in '1': .*batchnorm=\"exact\""):
        choose("refuse", first_layer())
    layers = [nn.BatchNorm1d(2) for _ in range(5)]
    with pytest.raises(UnsupportedError, match="'0', '1', '2' and 2 more"):
        choose("refuse", nn.Sequential(*layers))


def test_refuse_accepts_evaluation_mode_until_training_begins() -> None:
    model = first_layer()
    model[1].eval()
    policy = choose("refuse", model)
    policy.begin_window()
    model.train()
    with pytest.raises(UnsupportedError, match="BatchNorm in '1'"):
        policy.begin_window()


def test_unknown_policy() -> None:
    with pytest.raises(OptionError, match='batchnorm="exactly": must be one of "statistics", '):
        choose("exactly", first_layer())
    assert tracked_instance_norms(nn.Sequential(nn.InstanceNorm1d(2))) == []
