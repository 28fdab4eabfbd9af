"""A stream of random numbers for every micro-batch.

Lock-step runs the micro-batches interleaved. If they drew from one generator, a dropout in a
checkpointed block would be recomputed with the numbers of another micro-batch. `Streams` gives each
one a state of its own, derived from the caller's generator, and puts it in place when the
micro-batch has its turn.
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

    The seed is drawn from the caller's CPU generator, which so advances by the same amount whatever
    the number of micro-batches. `enter(k)` puts stream k in place, `leave(k)` keeps where it got
    to, `close()` gives the caller its own back; `rewind()` also undoes the draw of the seed.
    """

    def __init__(self, parties: int, devices: Iterable[torch.device] = ()) -> None:
        self._devices = sorted(
            {device for device in devices if device.type in ("cuda", "xpu")}, key=str
        )
        # The generators themselves: they change hands at every meeting.
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
        """Types of devices whose numbers a micro-batch has drawn, by what `leave` has kept."""
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
"""A call of a block: by which micro-batch, of which block, and which of its calls."""


class Begins:
    """Where in its micro-batch's stream each call of a block begins to draw.

    `offset()` is how far the stream is now, and `party()` whose it is. Calls that draw nothing are
    not in `of`.
    """

    def __init__(self, offset: Callable[[], int], party: Callable[[], int | None]) -> None:
        self.of: dict[Call, int] = {}
        self._offset = offset
        self._party = party
        self._calls: dict[tuple[int, str], int] = {}

    def call(self, name: str) -> Call:
        """The next call of this block by this micro-batch."""
        party = self._party() or 0
        number = self._calls.get((party, name), 0)
        self._calls[party, name] = number + 1
        return party, name, number

    @contextmanager
    def noted(self, name: str) -> Iterator[None]:
        """One call of a block, in the forward pass."""
        call, begin = self.call(name), self._offset()
        yield
        if self._offset() != begin:
            self.of[call] = begin


class RecordedStreams:
    """`Streams` inside a CUDA graph: the same numbers, from generators that the graph knows.

    Every replay gives them a seed before (`seed`). A block that is computed again in the backward
    pass has a generator of its own for that, which begins where the block began in the forward.
    """

    def __init__(self, parties: int, device: torch.device, begins: Mapping[Call, int]) -> None:
        self._device = device
        self._default = torch.cuda.default_generators[device.index or 0]
        self._own = self._default.graphsafe_get_state()
        self._main = [torch.Generator(device) for _ in range(parties)]
        self._again = {call: (torch.Generator(device), begin) for call, begin in begins.items()}

    @property
    def generators(self) -> list[torch.Generator]:
        """All that the graph has to be told of before it is recorded."""
        return [*self._main, *(generator for generator, _ in self._again.values())]

    def seed(self, seed: int) -> None:
        """The numbers that `Streams` gives for this seed, at the next replay."""
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
        """Give the caller its own generator back."""
        self._default.graphsafe_set_state(self._own)

    @contextmanager
    def again(self, call: Call) -> Iterator[None]:
        """The backward pass computes what this call computed."""
        if call not in self._again:
            yield
            return
        self._default.graphsafe_set_state(self._again[call][0])
        try:
            yield
        finally:
            self.enter(call[0])


def draw() -> int:
    """The seed of a window's streams, from the caller's generator."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def _mix(seed: int, party: int) -> int:
    """A seed for stream `party`: SplitMix64, so that neighbouring streams share nothing."""
    z = (seed + (party + 1) * _GOLDEN) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return (z ^ (z >> 31)) >> 1
