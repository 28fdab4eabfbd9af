"""A stream of random numbers for every micro-batch.

Lock-step interleaves the micro-batches. If they shared one generator, dropout in a checkpointed
block would be recomputed with the numbers of another micro-batch. `Streams` gives each micro-batch
its own state, derived from the caller's generator, and sets it for each of its turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["Begins", "Call", "RecordedStreams", "Streams", "draw"]

_GOLDEN = 0x9E3779B97F4A7C15


class Streams:
    """One random state per micro-batch on the CPU and on `devices`.

    The seed is drawn from the caller's CPU generator, which advances by the same amount for any
    number of micro-batches. `enter(k)` sets stream k and `leave(k)` saves its position. `close()`
    restores the caller's state; `rewind()` also undoes the draw of the seed.
    """

    def __init__(self, parties: int, devices: Iterable[torch.device] = ()) -> None:
        self._devices = sorted(
            {device for device in devices if device.type in ("cuda", "xpu")}, key=str
        )
        # Look the generators up once: their states are swapped at every meeting.
        self._generators = [torch.default_generator]
        for device in self._devices:
            index = device.index
            if index is None:
                index = torch.get_device_module(device.type).current_device()
            self._generators.append(torch.get_device_module(device.type).default_generators[index])
        self._before = self._get()
        self.seed = draw()
        self._after = self._get()
        self._states = [self._seeded(_mix(self.seed, k)) for k in range(parties)]
        self._first = list(self._states)

    def enter(self, party: int) -> None:
        self._set(self._states[party])

    def leave(self, party: int) -> None:
        self._states[party] = self._get()

    def close(self) -> None:
        self._set(self._after)

    def drawn(self) -> frozenset[str]:
        """Return the device types that random numbers were drawn on, by the saved states."""
        kinds = ["cpu", *(device.type for device in self._devices)]
        return frozenset(
            kind
            for states, first in zip(self._states, self._first, strict=True)
            for kind, now, then in zip(kinds, states, first, strict=True)
            if not torch.equal(now, then)
        )

    def rewind(self) -> None:
        self._set(self._before)

    def _get(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _seeded(self, seed: int) -> list[Tensor]:
        places: list[torch.device] = [torch.device("cpu"), *self._devices]
        return [torch.Generator(place).manual_seed(seed).get_state() for place in places]


Call = tuple[int, str, int]
"""A call of a block: its micro-batch, its block, and its index among their calls."""


class Begins:
    """The offset in its micro-batch's stream at which each call of a block begins to draw.

    `offset()` returns the current offset, and `party()` the current micro-batch. Calls that draw
    nothing are not in `of`.
    """

    def __init__(self, offset: Callable[[], int], party: Callable[[], int | None]) -> None:
        self.of: dict[Call, int] = {}
        self._offset = offset
        self._party = party
        self._calls: dict[tuple[int, str], int] = {}

    def call(self, name: str) -> Call:
        """Return the next call of this block by this micro-batch."""
        party = self._party() or 0
        number = self._calls.get((party, name), 0)
        self._calls[party, name] = number + 1
        return party, name, number

    @contextmanager
    def noted(self, name: str) -> Iterator[None]:
        """Record where one call of a block begins to draw, in the forward pass."""
        call, begin = self.call(name), self._offset()
        yield
        if self._offset() != begin:
            self.of[call] = begin


class RecordedStreams:
    """`Streams` inside a CUDA graph: the same numbers, from generators registered with the graph.

    Call `seed` before every replay. A block that is recomputed in the backward pass has its own
    generator for that, which starts where the block started in the forward.
    """

    def __init__(self, parties: int, device: torch.device, begins: Mapping[Call, int]) -> None:
        self._device = device
        self._default = torch.cuda.default_generators[device.index or 0]
        self._own = self._default.graphsafe_get_state()
        self._main = [torch.Generator(device) for _ in range(parties)]
        self._again = {call: (torch.Generator(device), begin) for call, begin in begins.items()}

    @property
    def generators(self) -> list[torch.Generator]:
        """All generators to register with the graph before capture."""
        return [*self._main, *(generator for generator, _ in self._again.values())]

    def seed(self, seed: int) -> None:
        """Make the next replay draw the numbers that `Streams` gives for this seed."""
        for party, generator in enumerate(self._main):
            generator.manual_seed(_mix(seed, party))
        for (party, _, _), (generator, begin) in self._again.items():
            generator.manual_seed(_mix(seed, party))
            generator.set_offset(begin)

    def enter(self, party: int) -> None:
        self._default.graphsafe_set_state(self._main[party])

    def leave(self, party: int) -> None:
        return

    def close(self) -> None:
        """Restore the caller's generator."""
        self._default.graphsafe_set_state(self._own)

    @contextmanager
    def again(self, call: Call) -> Iterator[None]:
        """Use the random numbers of this call while the backward pass recomputes it."""
        if call not in self._again:
            yield
            return
        self._default.graphsafe_set_state(self._again[call][0])
        try:
            yield
        finally:
            self.enter(call[0])


def draw() -> int:
    """Draw the seed of a window's streams from the caller's generator."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def _mix(seed: int, party: int) -> int:
    """Return the seed of stream `party`, by SplitMix64, so that streams are unrelated."""
    z = (seed + (party + 1) * _GOLDEN) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return (z ^ (z >> 31)) >> 1
