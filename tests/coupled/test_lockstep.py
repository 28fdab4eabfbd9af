"""Lock-step gives the gradients and running statistics of the undivided batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.coupled.networks import NETWORKS, resnet
from tests.coupled.windows import Dropped, batch, error, lockstep, result, split, total, whole
from wholebatch.errors import UnsupportedError

SIZES = {1: [12], 2: [7, 5], 5: [4, 1, 3, 1, 3], 12: [1] * 12}


@pytest.mark.parametrize("parts", SIZES)
@pytest.mark.parametrize("name", NETWORKS)
def test_equals_the_undivided_batch(name: str, parts: int) -> None:
    model = NETWORKS[name]().double()
    data = batch(12)
    gradients, statistics = whole(model, data)
    counts = {n: int(b) for n, b in model.named_buffers() if n.endswith("tracked")}
    got_gradients, got_statistics = lockstep(model, split(data, SIZES[parts]))
    assert error(got_gradients, gradients) <= 1e-12
    assert error(got_statistics, statistics) <= 1e-12
    calls = 2 if name == "reused" else 1
    after = {n: int(b) for n, b in model.named_buffers() if n.endswith("tracked")}
    assert after == {n: c + calls for n, c in counts.items()}


def test_32_micro_batches_of_uneven_sizes() -> None:
    model = resnet().double()
    data = batch(48)
    want = whole(model, data)
    got = lockstep(model, split(data, [1, 2] * 16))
    assert error(got[0], want[0]) <= 1e-12
    assert error(got[1], want[1]) <= 1e-12


@pytest.mark.parametrize("name", NETWORKS)
def test_plain_accumulation_is_far_off(name: str) -> None:
    model = NETWORKS[name]().double()
    data = batch(12)
    gradients, statistics = whole(model, data)
    for micro in split(data, [4, 4, 4]):
        total(model, micro).backward()
    got = result(model)
    assert error(got[0], gradients) > 0.05
    assert error(got[1], statistics) > 0.05


def test_second_window_continues_cumulative_statistics() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.Flatten())
    model.append(nn.Linear(64, 5)).double()
    reference = copy.deepcopy(model)
    for seed in range(3):
        data = batch(6, seed=seed)
        total(reference, data).backward()
        lockstep(model, split(data, [4, 2]))
    want, got = result(reference), result(model)
    assert error(got[0], want[0]) <= 1e-12
    assert error(got[1], want[1]) <= 1e-12


@pytest.mark.parametrize(
    "layers, shape",
    [
        ([nn.Linear(6, 4), nn.BatchNorm1d(4)], (7, 6)),
        ([nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)], (7, 3, 5)),
        ([nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3)], (7, 2, 3, 3, 3)),
        ([nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4)], (7, 3, 4, 4)),
    ],
)
def test_every_dimension(layers: list[nn.Module], shape: tuple[int, ...]) -> None:
    model = nn.Sequential(*layers, nn.ReLU(), nn.Flatten()).double()
    x = torch.randn(*shape, dtype=torch.float64)
    weight = torch.randn_like(model.eval()(x))
    model.train()

    def loss(model: nn.Module, micro: tuple[Tensor, Tensor]) -> Tensor:
        return (model(micro[0]) * micro[1]).sum()

    reference = copy.deepcopy(model)
    if isinstance(reference[1], nn.SyncBatchNorm):  # torch runs it on GPUs only
        reference[1] = nn.BatchNorm2d(4).double()
    loss(reference, (x, weight)).backward()
    got = lockstep(model, split((x, weight), [1, 4, 2]), loss=loss)
    assert error(got[0], result(reference)[0]) <= 1e-12
    assert error(got[1], result(reference)[1]) <= 1e-12


def test_channels_last_stays_channels_last() -> None:
    model = resnet().double().to(memory_format=torch.channels_last)
    data = batch(9)
    data = (data[0].to(memory_format=torch.channels_last), data[1])
    want = whole(model, data)
    seen: list[bool] = []
    model[0][0][1].register_forward_hook(
        lambda m, a, out: seen.append(out.is_contiguous(memory_format=torch.channels_last))
    )
    got = lockstep(model, split(data, [4, 4, 1]))
    assert error(got[0], want[0]) <= 1e-12
    assert seen == [True, True, True]


def test_frozen_layers_are_untouched() -> None:
    model = resnet().double()
    model[0][1].eval()
    data = batch(8)
    want = whole(model, data)
    frozen = model[0][1].bn1.running_mean.clone()
    got = lockstep(model, split(data, [3, 3, 2]))
    assert error(got[0], want[0]) <= 1e-12
    assert torch.equal(model[0][1].bn1.running_mean, frozen)


def test_frozen_affine_weights_and_inputs_without_gradient() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    model.append(nn.Linear(64, 5)).double()
    model[2].requires_grad_(False)
    data = batch(8)
    want = whole(model, data)
    got = lockstep(model, split(data, [3, 5]))
    assert error(got[0], want[0]) <= 1e-12


def test_instance_norm_statistics_move_once() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True, affine=True)
    )
    model.extend([nn.Flatten(), nn.Linear(64, 5)]).double()
    data = batch(8)
    want = whole(model, data)
    got = lockstep(model, split(data, [3, 1, 4]))
    assert error(got[0], want[0]) <= 1e-12
    assert error(got[1], want[1]) <= 1e-12


class NormAct(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: a forward of its own around F.batch_norm."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = self.momentum or 1.0 / float(self.num_batches_tracked)
        mean, var = self.running_mean, self.running_var
        y = F.batch_norm(input, mean, var, self.weight, self.bias, True, factor, self.eps)
        return F.silu(y)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_custom_batchnorm_that_calls_the_function(momentum: float | None) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), NormAct(4, momentum=momentum), nn.Flatten())
    model.append(nn.Linear(64, 5)).double()
    reference = copy.deepcopy(model)
    for seed in range(2):
        data = batch(8, seed=seed)
        total(reference, data).backward()
        lockstep(model, split(data, [3, 1, 4]))
    assert error(result(model)[0], result(reference)[0]) <= 1e-12
    assert error(result(model)[1], result(reference)[1]) <= 1e-12
    assert model[1].num_batches_tracked == 2


class OwnMaths(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return input - input.mean((0, 2, 3), keepdim=True)


def test_custom_batchnorm_with_its_own_maths_is_refused() -> None:
    model = nn.Sequential(OwnMaths(3), nn.Flatten(), nn.Linear(108, 5)).double()
    with pytest.raises(UnsupportedError, match=r"'0' \(OwnMaths\) .* does not call F.batch_norm"):
        lockstep(model, split(batch(4), [2, 2]))


def test_lazy_batchnorm() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LazyBatchNorm2d(), nn.Flatten())
    model.append(nn.Linear(64, 5)).double()
    data = batch(6)
    got = lockstep(model, split(data, [2, 4]))
    model.zero_grad()
    reference = copy.deepcopy(model)
    reference[1].reset_running_stats()
    assert error(got[1], whole(reference, data)[1]) <= 1e-12


def test_autocast_is_no_further_from_float64_than_the_whole_batch() -> None:
    exact = resnet().double()
    data = batch(16)
    want = whole(exact, data)[0]
    model = copy.deepcopy(exact).float()
    low = (data[0].float(), data[1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        own = error(whole(model, low)[0], want)
        dtypes: list[torch.dtype] = []
        model[0][0][0].register_forward_hook(lambda m, a, out: dtypes.append(out.dtype))
        got = error(lockstep(model, split(low, [5, 6, 5]))[0], want)
    assert dtypes == [torch.bfloat16] * 3
    assert own > 1e-4
    assert got <= 1.25 * own


def test_pure_bfloat16_model() -> None:
    model = resnet().bfloat16()
    x, y = batch(8, dtype=torch.float32)
    gradients, statistics = lockstep(model, split((x.bfloat16(), y), [5, 3]))
    assert {g.dtype for g in gradients.values()} == {torch.bfloat16}
    assert {s.dtype for s in statistics.values()} == {torch.bfloat16}
    assert all(g.isfinite().all() for g in gradients.values())


@pytest.mark.parametrize("how", ["plain", "reentrant"])
def test_checkpointed_blocks_with_dropout_recompute_the_same(how: str) -> None:
    torch.manual_seed(3)
    kept = Dropped("kept").double()
    again = Dropped(how).double()
    again.load_state_dict(kept.state_dict())
    micros = split(batch(8), [3, 1, 4])
    torch.manual_seed(7)
    want = lockstep(kept, micros)
    torch.manual_seed(7)
    got = lockstep(again, micros)
    assert error(got[0], want[0]) <= 1e-14
    assert error(got[1], want[1]) <= 1e-14


def test_checkpointed_reused_layer() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh())
            self.head = nn.Sequential(nn.Flatten(), nn.Linear(108, 5))
            self.kept = True

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.block(x) if self.kept else checkpoint(self.block, x, use_reentrant=False)
            return self.head(x)

    model = Twice().double()
    data = batch(7)
    want = whole(model, data)
    model.kept = False
    got = lockstep(model, split(data, [3, 4]))
    assert error(got[0], want[0]) <= 1e-12
    assert error(got[1], want[1]) <= 1e-12
