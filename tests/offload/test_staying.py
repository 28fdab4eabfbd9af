"""Sums that stay on the device in a window's last backward: the update of the undivided batch.

The streams are those of a device that is not there; tests/gpu has the real ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.offload.seen import watching
from tests.offload.test_host import fused, in_pieces, made
from tests.support import EXACT, Whole, adamw, distance, mlp, samples, sgd
from wholebatch.offload import host_store as host
from wholebatch.offload.host_store import SumsOnDevice
from wholebatch.offload.transfer_to_host import CudaTransfer


@pytest.fixture
def stayed(streams: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every other sum stays; what stayed is noted by the size."""
    found: list[int] = []
    calls = iter(range(10**6))

    def room_for(self: SumsOnDevice, parameter: nn.Parameter, total: Tensor) -> Tensor | None:
        if next(calls) % 2:
            return None
        found.append(total.numel())
        self.sums[id(parameter)] = torch.full_like(total, float("nan"))
        return self.sums[id(parameter)]

    monkeypatch.setattr(host, "_transfer", lambda device, nbytes: CudaTransfer(device, nbytes))
    monkeypatch.setattr(SumsOnDevice, "room_for", room_for)
    return found


@pytest.mark.parametrize("sizes", [[10], [4, 4, 2], [1, 6, 3]], ids=str)
@pytest.mark.parametrize("make", [adamw, sgd, fused], ids=["adamw", "sgd", "fused"])
@pytest.mark.parametrize(
    "options",
    [{}, {"clip_norm": 0.05}, {"clip_value": 0.01}],
    ids=["plain", "clip_norm", "clip_value"],
)
def test_update_is_that_of_the_undivided_batch(
    stayed: list[int], make: Any, options: dict[str, Any], sizes: list[int]
) -> None:
    whole, model = Whole(mlp(), make, **options), mlp()
    train = made(model, make, units=lambda micro: len(micro["y"]), **options)
    with watching(model) as parts:
        for number in (10, 13, 10):
            in_pieces(train, sizes if number == 10 else [5, 8])
            whole.step(samples(number))
            train.step(samples(number))
            assert distance(parts.take(), whole.seen.gradients[-1]) <= EXACT
    whole.assert_same(model, at_most=10 * EXACT)
    assert stayed
    store: Any = train._window.store
    assert not store._on_device.sums


def test_gradient_hooks_see_the_whole_gradient(stayed: list[int]) -> None:
    seen: list[list[float]] = []
    for gradients in ("device", "host"):
        model = mlp()
        train = made(model, gradients=gradients)
        norms: list[float] = []
        parameter = next(model.parameters())
        parameter.register_hook(lambda grad, norms=norms: norms.append(float(grad.norm())))
        for update in range(3):
            train.step(samples(10 + update))
        seen.append(norms)
    assert stayed
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-12, atol=0)


def test_room_is_below_the_peak_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.zeros(2**19))
    total = torch.zeros(2**19)
    now = {"allocated_bytes.all.current": 10 * 2**20, "allocated_bytes.all.peak": 17 * 2**20}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: now)
    rooms = SumsOnDevice()
    rooms.begin([parameter])
    room = rooms.room_for(parameter, total)  # 2 MiB, and 4 MiB aside
    assert room is not None
    assert room.shape == total.shape
    now["allocated_bytes.all.current"] += 2 * 2**20
    assert rooms.room_for(parameter, total) is None
    assert rooms.room_for(parameter, total[: host._SMALLEST_TO_STAY // 4 - 1]) is None
    now["allocated_bytes.all.current"] = 0

    def full(*args: object, **options: object) -> Tensor:
        raise torch.OutOfMemoryError("in pieces")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", full)
        assert rooms.room_for(parameter, total) is None
    assert rooms.room_for(parameter, total) is None  # asked once in a window
    rooms.begin([parameter])
    assert rooms.room_for(parameter, total) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [adamw, fused], ids=["adamw", "fused"])
def test_same_bits_as_the_plain_window(stayed: list[int], make: Any, dtype: torch.dtype) -> None:
    models = [mlp(dtype=dtype), mlp(dtype=dtype)]
    for model, gradients in zip(models, ("device", "host"), strict=True):
        train = made(model, make, gradients=gradients)
        for number in (10, 13, 9):
            train.step(samples(number, dtype=dtype))
    assert stayed
    assert all(map(torch.equal, *(model.parameters() for model in models)))
