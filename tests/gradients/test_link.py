"""The link's bookkeeping, with streams that do everything at once (tests/gpu has the real ones)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from wholebatch.gradients import link as module
from wholebatch.gradients.link import Link, ring_bytes


class Event:
    pass


class Stream:
    """Waits are counted; there is nothing to wait for."""

    def __init__(self, device: Any = None) -> None:
        self.waited = 0

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)
        self.waited += 1

    def wait_stream(self, other: Stream) -> None:
        self.waited += 1

    def record_event(self) -> Event:
        return Event()

    def synchronize(self) -> None:
        pass


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    current = Stream()

    @contextmanager
    def within(stream: Stream) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(module, "_SMALLEST", 4 * 10)  # slots of ten numbers


@pytest.mark.usefixtures("streams")
def test_sums_of_any_size_and_order_are_those_of_plain_addition() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (3, 25, 10, 1, 0, 17)
    totals = [torch.full((size,), float("nan")) for size in sizes]
    link = Link(torch.device("cpu"), 0)
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
    link = Link(torch.device("cpu"), 0)
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


def test_the_ring_is_a_small_share_of_the_sums() -> None:
    assert ring_bytes(2**30) <= 2**30 * 0.032
    assert ring_bytes(2**40) == 128 * 2**20
