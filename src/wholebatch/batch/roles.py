"""What each leaf of a run's batches is, decided at the first batch by the leaf's path.

The contents of one batch cannot tell a list of three class names from a list of three samples. So a
leaf keeps the role that it had in the first batch. A leaf whose contents contradict its role is
refused, with its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wholebatch.errors import SplitError

_SAMPLES = 0


class Roles:
    """The roles of the leaves of a run's batches, by path."""

    def __init__(self) -> None:
        self._entries: dict[str, int] = {}
        """The entries of a leaf that is passed on whole; 0 for one entry per sample."""
        self._is_text: dict[str, bool] = {}
        """True for a leaf that was as wide as the text in the first batch."""

    def is_split(self, name: str, entries: int, size: int, fits: Callable[[], bool]) -> bool:
        """Return True if a leaf has one entry for each of `size` samples; refuse another role.

        `fits()` tells it by the contents of this batch. A batch of one sample decides nothing: a
        tensor with one row fits both roles.
        """
        known = self._entries.get(name)
        if size == 1:
            return fits() if known is None else known == _SAMPLES
        if known is None:
            known = self._entries[name] = _SAMPLES if fits() else entries
        if known == _SAMPLES:
            if entries != size:
                raise _changed(name, "had one entry for each sample", entries, size)
            return True
        if entries != known and fits():
            raise _changed(name, "was passed on whole", entries, size)
        return False

    def is_text(self, name: str, is_as_wide: bool) -> bool:
        """Return True if a leaf was as wide as the text in the first batch; refuse a change."""
        is_text = self._is_text.setdefault(name, is_as_wide)
        if is_text and not is_as_wide:
            raise SplitError(
                f"{name!r} was as wide as the text in the first batch, and trimmed like it; now it "
                "is not: name the leaves to trim, wb.tokens(..., trim=(...))"
            )
        return is_text

    def state_dict(self) -> dict[str, Any]:
        """Return the roles, to resume with."""
        return {"entries": dict(self._entries), "is_text": dict(self._is_text)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on with these roles."""
        self._entries, self._is_text = dict(saved["entries"]), dict(saved["is_text"])


def _changed(name: str, role: str, entries: int, size: int) -> SplitError:
    return SplitError(
        f"{name!r} {role} in the batches before, and has {entries} for {size} samples now: give it "
        "one entry for each sample in every batch, or, if it is not a value per sample, name it: "
        f"micro_batch=wb.samples(..., static={name!r})"
    )
