"""Batch sizes that change during a run: `64@0,128@1000,256@4000`.

Each part is SIZE@PLACE. A plain place counts updates. The suffix `ep` counts epochs. The suffix
`tok` counts units (tokens, or whatever the recipe's loss is a mean over), with k, M, B or T before
it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import Literal, TypeAlias

from wholebatch.errors import OptionError
from wholebatch.tune.batch_scaling.batch_arithmetic import check_count

By: TypeAlias = Literal["updates", "epochs", "tokens"]

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)([kKMBGT]?)(ep|epochs?|tok|tokens?)?")
_THOUSANDS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_MOST = 10**18
_SUFFIX = {"updates": "", "epochs": "ep", "tokens": "tok"}


@dataclass(frozen=True)
class Amount:
    """A number of updates, epochs or tokens.

    >>> parse_amount("5ep"), parse_amount("2Mtok"), parse_amount("500")
    (Amount(number=5, by='epochs'), Amount(number=2000000, by='tokens'), Amount(number=500, by='updates'))
    """  # noqa: E501

    number: int
    by: By

    def __str__(self) -> str:
        return f"{self.number}{_SUFFIX[self.by]}"


def parse_amount(text: str, label: str = "") -> Amount:
    """Parse `1000`, `5ep` or `2Mtok`; raise an OptionError for anything else."""
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise OptionError(
            f"{label or text}: {text.strip()!r} must be a number of updates (1000), epochs (2ep) "
            "or tokens (2Mtok; k, M, B, T)"
        )
    # Not a float: 8.2 million must stay a whole number.
    number = Decimal(match[1]) * _THOUSANDS[match[2]]
    kind = match[3] or ""
    by: By = "epochs" if kind.startswith("ep") else "tokens" if kind else "updates"
    if number > _MOST:
        raise OptionError(f"{label or text}: {text.strip()!r} is more {by} than a run can have")
    if number != int(number):
        raise OptionError(f"{label or text}: {text.strip()!r} must be a whole number of {by}")
    return Amount(int(number), by)


@dataclass(frozen=True)
class BatchSchedule:
    """`changes[i] = (place, size)`: this batch size from that place on, until the next.

    >>> schedule = BatchSchedule.parse("64@0,128@1k,256@4k")
    >>> [schedule.at(update=update) for update in (0, 999, 1000, 5000)]
    [64, 64, 128, 256]
    >>> BatchSchedule.parse("32@0, 64@2Mtok").at(update=7, tokens=2_000_000)
    64
    """

    changes: tuple[tuple[int, int], ...]
    by: By = "updates"

    def __post_init__(self) -> None:
        places = [place for place, _ in self.changes]
        rise = all(before < after for before, after in pairwise(places))
        if not places or places[0] != 0 or not rise:
            raise OptionError(f"changes={self.changes!r}: places must begin at 0, and rise")
        for _, size in self.changes:
            check_count("size", size)

    @staticmethod
    def parse(text: str, label: str = "--batch-size") -> BatchSchedule:
        """Parse the text of an option; an OptionError says which part is wrong, and how."""
        said = f"{label} {text}"
        changes: list[tuple[int, int]] = []
        kinds: dict[By, str] = {}
        for part in text.split(","):
            size_text, at, place_text = (piece.strip() for piece in part.partition("@"))
            if not at or not size_text or not place_text:
                raise OptionError(
                    f"{said}: {part.strip()!r} must be SIZE@PLACE, as in 64@0,128@1000 (updates), "
                    "128@2ep (epochs) or 256@2Mtok (tokens)"
                )
            is_count = size_text.isascii() and size_text.isdigit() and len(size_text) < 19
            if not is_count or int(size_text) == 0:
                raise OptionError(
                    f"{said}: the size {size_text!r} must be a whole number of samples above 0"
                )
            place = parse_amount(place_text, said)
            if place.number:  # 0 needs no unit.
                kinds.setdefault(place.by, part.strip())
            changes.append((place.number, int(size_text)))
        if len(kinds) > 1:
            first, second, *_ = kinds.items()
            raise OptionError(
                f"{said}: {first[1]!r} counts {first[0]} and {second[1]!r} {second[0]}; count one "
                "thing, so that their order is known"
            )
        if changes[0][0] != 0:
            raise OptionError(f"{said}: must begin at 0, as in {changes[0][1]}@0,…")
        for (before, _), (after, _) in pairwise(changes):
            if after <= before:
                raise OptionError(f"{said}: {after} must come after {before}: places must rise")
        return BatchSchedule(tuple(changes), by=next(iter(kinds), "updates"))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return all batch sizes, in order."""
        return tuple(size for _, size in self.changes)

    @property
    def first(self) -> int:
        return self.changes[0][1]

    @property
    def largest(self) -> int:
        return max(self.sizes)

    def at(self, *, update: int = 0, epoch: int = 0, tokens: float = 0.0) -> int:
        """Return the size of the next batch after `update` updates and `tokens`, in `epoch`."""
        now = {"updates": update, "epochs": epoch, "tokens": tokens}[self.by]
        if not now >= 0:
            raise OptionError(f"{self.by}: {now!r} must be at least 0")
        return next(size for place, size in reversed(self.changes) if place <= now)

    def steps(self, *, micro_batch: int, ranks: int = 1) -> dict[int, int]:
        """Return the schedule as `steps=` of an Accumulator; by epoch, wrap it in `wb.by_epoch`.

        >>> BatchSchedule.parse("64@0,128@1000").steps(micro_batch=8, ranks=2)
        {0: 4, 1000: 8}
        """
        if self.by == "tokens":
            raise OptionError(f"{self}: steps= goes by update or by epoch, not by tokens")
        check_count("micro_batch", micro_batch)
        check_count("ranks", ranks)
        for _, size in self.changes:
            if size % (micro_batch * ranks):
                raise OptionError(
                    f"{self}: a batch of {size} is no multiple of {micro_batch} samples × {ranks} "
                    "ranks; a loop of one's own has micro-batches of one size"
                )
        return {place: size // (micro_batch * ranks) for place, size in self.changes}

    def __str__(self) -> str:
        return ",".join(
            f"{size}@{place}{_SUFFIX[self.by] if place else ''}" for place, size in self.changes
        )
