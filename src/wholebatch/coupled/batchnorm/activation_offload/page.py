"""Pages: storages of a micro-batch that may be on the device or on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from wholebatch.coupled.batchnorm.activation_offload.host_pool import Span
from wholebatch.coupled.batchnorm.activation_offload.learned_sizes import Place

__all__ = ["Page", "Paged"]


@dataclass(frozen=True, slots=True)
class Paged:
    """The bytes of one run: the peak of pages on the device, and the copies out and in."""

    peak: int
    bytes_out: int
    bytes_in: int


@dataclass(eq=False, slots=True)
class Page:
    """One storage, and the location of its bytes."""

    weak: int
    nbytes: int
    device: torch.device
    owner: int
    place: Place
    seen: int  # The stretch in which it was last touched.
    span: Span | None = None
    resident: bool = True
    shared: bool = False  # Used by several micro-batches: it stays on the device.
    arriving: bool = False  # Being prefetched.
    waits: bool = False  # Its micro-batch sleeps and the host has a copy: it may be freed.
    kept: bool = False  # Its micro-batch sleeps, but it is needed too soon to be copied.
    left: int = -1  # The turn in which its micro-batch went to sleep.

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage, or None if it has been freed."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.weak)
        return found
