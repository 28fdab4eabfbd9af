"""The parts of a window whose gradients are summed on the host."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from wholebatch.offload.parameter_buckets import HostSums, flat_of, in_shape_of, total_norm
from wholebatch.offload.transfer_to_host import HostTransfer, add_on_host


def test_transfer_on_the_host_adds_at_once_and_refuses_other_sizes() -> None:
    threads = threading.active_count()
    transfer = HostTransfer()
    total = torch.zeros(1000)
    for index in range(50):
        transfer.put(torch.full((1000,), float(index)), total, first=index == 0)
    assert torch.equal(total, torch.full((1000,), 1225.0))
    assert transfer.bytes_out == 50 * 4000
    assert threading.active_count() == threads
    with pytest.raises(ValueError, match="a gradient of 3 for a sum of 1000"):
        transfer.put(torch.zeros(3), total, first=False)
    with pytest.raises(RuntimeError, match="single memory location"):
        transfer.put(torch.zeros(1000), torch.zeros(1).expand(1000), first=False)
    transfer.put(torch.ones(1000), total, first=True)
    transfer.drain()
    assert torch.equal(total, torch.ones(1000))


def test_addition_of_sixteen_bit_gradients_rounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholebatch.offload.transfer_to_host._CAST", 7)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(50, generator=generator).bfloat16() for _ in range(9)]
    total = torch.empty(50)
    for index, part in enumerate(parts):
        add_on_host(total, part, first=index == 0)
    wanted = parts[0].float()
    for part in parts[1:]:
        wanted += part.float()
    assert torch.equal(total, wanted)


def test_norm_of_long_rows_and_of_large_numbers() -> None:
    row = torch.full((3_000_001,), 0.1)
    wanted = torch.linalg.vector_norm(row.double())
    assert abs(float(total_norm([row]) / wanted) - 1.0) < 1e-6
    assert float(total_norm([torch.full((4,), 1e25)])) == pytest.approx(2e25)
    assert not torch.isfinite(total_norm([torch.tensor([1.0, float("inf")])]))
    assert float(total_norm([])) == 0.0


def test_sums_keep_the_order_of_memory() -> None:
    parameter = nn.Parameter(torch.randn(4, 3, 2, 5).to(memory_format=torch.channels_last))
    sums = HostSums([[parameter]])
    gradient = torch.randn(4, 3, 2, 5)
    sums.flat(parameter).copy_(flat_of(gradient, parameter))
    assert sums.shaped(parameter) is None
    sums.filled.add(id(parameter))
    held = sums.shaped(parameter)
    assert held is not None
    assert torch.equal(held, gradient)
    assert held.stride() == parameter.stride()
    assert torch.equal(in_shape_of(parameter, flat_of(gradient, parameter)), gradient)
