"""A stream of random numbers for every micro-batch.

Lock-step runs the micro-batches interleaved. If they drew from one generator, a dropout in a
checkpointed block would be recomputed with the numbers of another micro-batch. `Streams` gives each
one a state of its own, derived from the caller's generator, and puts it in place when the
micro-batch has its turn.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Streams", "draw"]

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
        self._before = self._get()
        seed = draw()
        self._after = self._get()
        self._states = [self._seeded(_mix(seed, k)) for k in range(parties)]
        self._first = list(self._states)

    def enter(self, party: int) -> None:
        self._set(self._states[party])

    def leave(self, party: int) -> None:
        self._states[party] = self._get()

    def close(self) -> None:
        self._set(self._after)

    def drawn(self) -> bool:
        """Whether a micro-batch has drawn a number, by what `leave` has kept so far."""
        return not all(
            torch.equal(now, then)
            for states, first in zip(self._states, self._first, strict=True)
            for now, then in zip(states, first, strict=True)
        )

    def rewind(self) -> None:
        self._set(self._before)

    def _get(self) -> list[Tensor]:
        on_device = [torch.get_device_module(d.type).get_rng_state(d) for d in self._devices]
        return [torch.get_rng_state(), *on_device]

    def _set(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            torch.get_device_module(device.type).set_rng_state(state, device)

    def _seeded(self, seed: int) -> list[Tensor]:
        places: list[torch.device] = [torch.device("cpu"), *self._devices]
        return [torch.Generator(place).manual_seed(seed).get_state() for place in places]


def draw() -> int:
    """The seed of a window's streams, from the caller's generator."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def _mix(seed: int, party: int) -> int:
    """A seed for stream `party`: SplitMix64, so that neighbouring streams share nothing."""
    z = (seed + (party + 1) * _GOLDEN) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return (z ^ (z >> 31)) >> 1
