"""What surrounds a recording, with stand-ins for CUDA's streams."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from wholebatch.compile import cuda_graph as graph


class Stream:
    """Counts how many there are."""

    made = 0

    def __init__(self, device: torch.device) -> None:
        type(self).made += 1
        self.waited_for: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited_for.append(other)


def test_all_rehearsals_share_a_stream_because_each_would_keep_a_workspace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cuda")
    current = Stream(device)
    used: list[Any] = []
    monkeypatch.setattr(Stream, "made", 0)
    monkeypatch.setattr(graph.torch.cuda, "Stream", Stream)
    monkeypatch.setattr(graph.torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(
        graph.torch.cuda, "stream", lambda side: (used.append(side), nullcontext())[1]
    )
    graph._side.cache_clear()
    try:
        runs: list[int] = []
        for kind in range(3):
            found = graph.rehearse(lambda kind=kind: [torch.tensor(kind)], device, captures=True)
            runs.append(int(found[0]))
    finally:
        graph._side.cache_clear()
    assert runs == [0, 1, 2]
    assert Stream.made == 1
    assert used == [used[0]] * 3
    assert used[0].waited_for == [current] * 3  # what came before is over
    assert current.waited_for == [used[0]] * 3  # and so is the rehearsal, for what follows
