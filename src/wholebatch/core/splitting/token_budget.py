"""The token budget of micro-batches: `tokens(...)`, accepted by `split` and `WholeBatch`.

The budget counts *padded* tokens, samples × the longest of them, because memory depends on those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Number
from typing import Any, Literal

from wholebatch.core.splitting.layout import is_positive
from wholebatch.errors import OptionError

__all__ = ["Tokens", "check_micro_batch", "tokens"]


@dataclass(frozen=True)
class Tokens:
    """A micro-batch size in tokens; made by `tokens`."""

    budget: int
    mask: str | None = None
    pad: Mapping[str, float] | None = None
    lengths: str | None = None
    trim: Mapping[str, tuple[int, ...]] | None = None
    sort: bool = True
    multiple: int = 1

    def __post_init__(self) -> None:
        if not is_positive(self.budget):
            raise OptionError(f"tokens({self.budget!r}): must be a positive number of tokens")
        if not is_positive(self.multiple):
            raise OptionError(
                f"tokens(multiple={self.multiple!r}): must be a positive number of tokens"
            )
        declared = [name for name in ("mask", "pad", "lengths") if getattr(self, name) is not None]
        if len(declared) > 1:
            raise OptionError(
                f"tokens({' and '.join(f'{name}=' for name in declared)}): give one of them; each "
                "says how long the samples are"
            )
        for option in ("mask", "lengths"):
            value = getattr(self, option)
            if value is not None and not (isinstance(value, str) and value):
                raise OptionError(
                    f"tokens({option}={value!r}): must be the name of a leaf of the batch"
                )
        if self.pad is not None and not (
            isinstance(self.pad, Mapping)
            and self.pad
            and all(isinstance(value, Number) for value in self.pad.values())
        ):
            raise OptionError(
                f"tokens(pad={self.pad!r}): must give the padding value of each leaf by its name, "
                'such as {"input_ids": 0, "labels": -100}'
            )
        if self.trim is not None:
            object.__setattr__(self, "trim", _checked_trim(self.trim))

    def __str__(self) -> str:
        return f"{self.budget} tokens"


def tokens(
    budget: int,
    *,
    mask: str | None = None,
    pad: Mapping[str, float] | None = None,
    lengths: str | None = None,
    trim: Mapping[str, tuple[int, ...]] | None = None,
    sort: bool = True,
    multiple: int = 1,
) -> Tokens:
    """Return a micro-batch size of at most `budget` padded tokens, for `split` and `WholeBatch`.

    Give the length of each sample by one of

    - `mask`: the name of a `[samples, tokens]` leaf that is nonzero for real tokens;
    - `pad`: the padding value of each leaf that decides, `{"input_ids": 0, "labels": -100}`: a
      token is padding if all of them have their padding value;
    - `lengths`: the name of a leaf with one length per sample.

    If none is given, an "attention_mask" in the batch is the mask. Without one, nothing is trimmed,
    and every sample counts as many tokens as the batch is wide. A sample is never cut shorter than
    its last label (in a leaf called "labels") that is not -100: such labels count in the loss even
    where the mask is zero. `pad` or `trim` can override this for the labels.

    Leaves of shape `[samples, tokens, ...]` are trimmed. If the width appears in another dimension
    (an attention mask `[samples, 1, tokens, tokens]`), `trim={"name": (2, 3)}` says which
    dimensions to trim, and `trim={"name": ()}` says none. `sort=False` keeps the order of the
    samples.

    `multiple=64` trims to multiples of 64 tokens, so that micro-batches have few different shapes.
    Each shape gets its own graph if micro-steps are compiled or captured (`execute=`).

    >>> import torch
    >>> batch = {
    ...     "input_ids": torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0], [4, 5, 6, 7], [8, 9, 0, 0]]),
    ...     "length": [2, 1, 4, 2],
    ... }
    >>> from wholebatch.core.splitting import split
    >>> [micro["input_ids"].tolist() for micro in split(batch, tokens(6, lengths="length"))]
    [[[4, 5, 6, 7]], [[1, 2], [8, 9], [3, 0]]]
    """
    return Tokens(
        budget, mask=mask, pad=pad, lengths=lengths, trim=trim, sort=sort, multiple=multiple
    )


def check_micro_batch(micro_batch: Any) -> int | Tokens | Literal["auto"]:
    """Return the option; refuse it unless it is a number of samples, "auto" or a token budget."""
    if isinstance(micro_batch, Tokens):
        return micro_batch
    if isinstance(micro_batch, str) and micro_batch == "auto":
        return "auto"
    if not is_positive(micro_batch):
        raise OptionError(
            f'micro_batch={micro_batch!r}: must be a positive number of samples, "auto", or '
            "wb.tokens(4096)"
        )
    return int(micro_batch)


def _checked_trim(trim: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    if not isinstance(trim, Mapping):
        raise OptionError(
            f'tokens(trim={trim!r}): must give dimensions by the name of a leaf, {{"bias": (1, 2)}}'
        )
    checked = {}
    for name, dims in trim.items():
        if not isinstance(dims, (tuple, list)) or not all(
            is_positive(dim) or (dim == 0 and dim is not False) for dim in dims
        ):
            raise OptionError(
                f"tokens(trim={{{name!r}: {dims!r}}}): must be a tuple of dimensions, such as (1,)"
            )
        checked[name] = tuple(int(dim) for dim in dims)
    return checked
