"""Streams of a device that is not there: they do everything at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from wholebatch.offload import transfer_to_host as module


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
