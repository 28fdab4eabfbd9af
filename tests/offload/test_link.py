"""The link's bookkeeping, with streams that do everything at once (tests/gpu has the real ones)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from wholebatch.offload.transfer_to_host import CudaTransfer, ring_bytes


@pytest.mark.usefixtures("streams")
def test_sums_of_any_size_and_order_are_those_of_plain_addition() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (3, 25, 10, 1, 0, 17)
    totals = [torch.full((size,), float("nan")) for size in sizes]
    link = CudaTransfer(torch.device("cpu"), 0)
    wanted = [torch.zeros(size) for size in sizes]
    seen: set[int] = set()
    norms: dict[int, list[torch.Tensor]] = {}
    sent = 0
    for window in range(4):
        order = torch.randperm(len(sizes), generator=generator).tolist()
        last = window == 3
        for index in order[: 4 if window == 0 else 6]:  # the first has not all of them
            gradient = torch.randn(sizes[index], generator=generator).bfloat16()
            mine = norms.setdefault(index, []) if last else None
            link.put(gradient, totals[index], first=index not in seen, norms=mine)
            wanted[index] += gradient.float()
            seen.add(index)
            sent += 4 * sizes[index]
        link.backward_made()
    link.drain()
    for index, (total, want) in enumerate(zip(totals, wanted, strict=True)):
        assert torch.equal(total, want)
        if sizes[index]:
            norm = torch.linalg.vector_norm(torch.stack(norms[index]))
            torch.testing.assert_close(norm, torch.linalg.vector_norm(want.double()))
    assert link.bytes_out == sent


@pytest.mark.usefixtures("streams")
def test_a_sum_that_comes_twice_in_a_backward_waits_for_itself() -> None:
    link = CudaTransfer(torch.device("cpu"), 0)
    total = torch.zeros(4)
    link.put(torch.ones(4), total, first=True)
    inward: Any = link._in
    before = inward.waited
    link.put(torch.ones(4), total, first=False)
    assert inward.waited > before
    link.drain()
    assert torch.equal(total, torch.full((4,), 2.0))
    with pytest.raises(ValueError, match="a gradient of 3 for a sum of 4"):
        link.put(torch.ones(3), total, first=False)


@pytest.mark.usefixtures("streams")
def test_sums_that_stay_are_complete_where_they_stay() -> None:
    link = CudaTransfer(torch.device("cpu"), 0)
    totals = [torch.arange(25.0), torch.arange(3.0), torch.full((17,), float("nan"))]
    gradients = [torch.randn(len(total)) for total in totals]
    stay = [torch.empty(25), None, torch.empty(17)]
    norms: list[list[torch.Tensor]] = [[], [], []]
    wanted = [totals[0] + gradients[0], totals[1] + gradients[1], gradients[2]]
    before = totals[0].clone()
    for index, gradient in enumerate(gradients):
        link.put(
            gradient,
            totals[index],
            first=index == 2,
            norms=norms[index],
            stays=stay[index],
        )
    first = stay[0]
    assert first is not None
    link.put(gradients[0], first, first=False, stays=first)  # a second gradient of it
    link.drain()
    wanted[0] = wanted[0] + gradients[0]
    assert torch.equal(totals[0], before)
    for want, total, here in zip(wanted, totals, stay, strict=True):
        assert torch.equal(total if here is None else here, want)
    assert link.bytes_out == 4 * 3
    for index in (1, 2):
        norm = torch.linalg.vector_norm(torch.stack(norms[index]))
        torch.testing.assert_close(norm, torch.linalg.vector_norm(wanted[index].double()))


@pytest.mark.usefixtures("streams")
def test_a_graph_adds_to_the_sums_or_drops_them() -> None:
    link = CudaTransfer(torch.device("cpu"), 0)
    total, drop = torch.full((25,), float("nan")), torch.tensor(True)
    for number in range(1, 4):
        with link.from_graph(drop):
            link.put(torch.ones(25), total, first=False)
        assert torch.equal(total, torch.full((25,), float(number)))
        drop.fill_(False)
    assert all(slot.left is None for slot in link._slots)  # no event outlives a capture


def test_the_ring_is_a_small_share_of_the_sums() -> None:
    assert ring_bytes(2**30) <= 2**30 * 0.032
    assert ring_bytes(2**40) == 128 * 2**20
