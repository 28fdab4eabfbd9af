"""One storage of a micro-batch that may be on the device or on the host, and what a run moved."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from wholebatch.runners.hostpool import Span
from wholebatch.runners.learnt import Place

__all__ = ["Page", "Paged"]


@dataclass(frozen=True, slots=True)
class Paged:
    """What one run moved: the most bytes of pages on the device at once, and those copied."""

    peak: int
    bytes_out: int
    bytes_in: int


@dataclass(eq=False, slots=True)
class Page:
    """One storage: where its bytes are."""

    weak: int
    nbytes: int
    device: torch.device
    owner: int
    place: Place
    seen: int  # the stretch in which it was last touched
    span: Span | None = None
    resident: bool = True
    shared: bool = False  # belongs to several micro-batches: it stays on the device
    arriving: bool = False  # being fetched ahead
    waits: bool = False  # its micro-batch sleeps, the host has it: its memory may be given back
    kept: bool = False  # its micro-batch sleeps, and it is needed too soon to be copied
    left: int = -1  # the turn in which its micro-batch went to sleep

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, or None if nobody holds it any more."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.weak)
        return found
