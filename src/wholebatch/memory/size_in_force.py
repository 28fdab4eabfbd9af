"""The micro-batch size in force: down at once when it does not fit, up again when there is room."""

from __future__ import annotations

from wholebatch.errors import OptionError

__all__ = ["Sizing"]

_STEP_UP = 1.25
_SPARE = 0.95
_MOST_PATIENCE = 1280


class Sizing:
    """Remembers how large micro-batches may be, from window to window.

    >>> sizing = Sizing(32, most=64, patience=2)
    >>> sizing.failed(32, into=16)
    >>> sizing.size
    16
    >>> for _ in range(4):
    ...     sizing.went_well(peak=500, budget=1000)
    >>> sizing.size
    20

    After `patience` windows without a failure it tries a quarter more, if the peak that was
    measured leaves room for it (or if nothing was measured); with `returns` it tries `most` again,
    the size that a user asked for. Each failure doubles the patience, up to a limit: data whose
    sequences grow would otherwise fail again and again.
    """

    def __init__(self, size: int, *, most: int, patience: int = 20, returns: bool = False) -> None:
        if not 1 <= size <= most:
            raise OptionError(f"size={size}: must be from 1 to most={most} samples")
        self.size = size
        self.most = most
        self._patience = patience
        self._returns = returns
        self._well = 0

    @property
    def patience(self) -> int:
        """Windows without a failure before a larger size is tried."""
        return self._patience

    def failed(self, samples: int, *, into: int) -> None:
        """A micro-batch of so many samples ran out of memory and was cut into parts of `into`."""
        if samples <= self.size:
            self.size = into
        self._patience = min(_MOST_PATIENCE, 2 * self._patience)
        self._well = 0

    def went_well(self, *, peak: int | None = None, budget: int | None = None) -> None:
        """A window ended without a failure; `peak` is the memory that it took."""
        self._well += 1
        if self._well < self._patience or self.size == self.most:
            return
        self._well = 0
        if self._returns:
            self.size = self.most
            return
        larger = min(self.most, max(self.size + 1, int(self.size * _STEP_UP)))
        # The part of the peak that does not grow with the size only makes this too careful.
        if peak is None or budget is None or peak * larger / self.size <= _SPARE * budget:
            self.size = larger

    def state_dict(self) -> dict[str, int]:
        """To resume with the same splits."""
        return {"size": self.size, "patience": self._patience, "well": self._well}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on as `state_dict` says."""
        self.size = min(self.most, state["size"])
        self._patience = state["patience"]
        self._well = state["well"]
