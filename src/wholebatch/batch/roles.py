"""What each leaf of a run's batches is, decided at the first batch by the leaf's path.

The contents of one batch cannot tell a list of three class names from a list of three samples. So a
leaf keeps the role that it had in the first batch in which it could be told. A leaf whose contents
contradict its role is refused, with its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wholebatch.errors import SplitError


class Roles:
    """The roles of the leaves of a run's batches, by path.

    A leaf has one entry for each sample, or is passed on whole. A batch of one sample tells
    nothing: a tensor with one row fits both.
    """

    def __init__(self) -> None:
        self._samples: set[str] = set()
        self._whole: dict[str, set[int]] = {}
        """The numbers of entries that a leaf had when it could be no list of samples."""
        self._as_wide: dict[str, bool] = {}
        """True for a leaf that was as wide as the text in every batch so far."""
        self._trimmed: set[str] = set()

    def is_split(self, name: str, entries: int, size: int, fits: Callable[[], bool]) -> bool:
        """Return True if a leaf has one entry for each of `size` samples; refuse another role.

        `fits()` tells it by the contents of this batch. A leaf that was passed on whole with as
        many entries before is passed on whole again: the number of samples is a coincidence.
        """
        if size == 1:
            return name in self._samples if self._knows(name) else fits()
        if name in self._samples:
            if entries == size:
                return True
            raise SplitError(
                f"{name!r} had one entry for each sample in the batches before, and has {entries} "
                f"for {size} samples now: {_advice(name)}"
            )
        if entries in self._whole.get(name, ()):
            return False
        if not fits():
            self._whole.setdefault(name, set()).add(entries)
            return False
        if name in self._whole:
            raise SplitError(
                f"{name!r} was passed on whole in the batches before, and has one entry for each "
                f"of {size} samples now: {_advice(name)}"
            )
        self._samples.add(name)
        return True

    def _knows(self, name: str) -> bool:
        return name in self._samples or name in self._whole

    def is_text(self, name: str, is_as_wide: bool, is_cut: bool) -> bool:
        """Return True if a leaf was as wide as the text in every batch so far, this one included.

        `is_cut`: some samples of this batch are shorter than the text, so that it is trimmed.
        """
        if not is_as_wide and name in self._trimmed:
            raise SplitError(
                f"{name!r} was as wide as the text in the batches before, and trimmed like it; now "
                "it is not: name the leaves to trim, wb.tokens(..., trim=(...))"
            )
        self._as_wide[name] = is_text = is_as_wide and self._as_wide.get(name, True)
        if is_text and is_cut:
            self._trimmed.add(name)
        return is_text

    def state_dict(self) -> dict[str, Any]:
        """Return the roles, to resume with."""
        return {
            "samples": sorted(self._samples),
            "whole": {name: sorted(entries) for name, entries in self._whole.items()},
            "as_wide": dict(self._as_wide),
            "trimmed": sorted(self._trimmed),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on with these roles."""
        self._samples = set(saved["samples"])
        self._whole = {name: set(entries) for name, entries in saved["whole"].items()}
        self._as_wide = dict(saved["as_wide"])
        self._trimmed = set(saved["trimmed"])


def _advice(name: str) -> str:
    return (
        "give it one entry for each sample in every batch, or, if it is not a value per sample, "
        f"name it: micro_batch=wb.samples(..., static={name!r})"
    )
