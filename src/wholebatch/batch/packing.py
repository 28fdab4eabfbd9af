"""Micro-batches without padding: several sequences in one row, each with its own positions.

A row holds whole sequences, one after the other. `position_ids` begin at 0 with each of them, and
no `attention_mask` is given: from this, models of Transformers and others that read `position_ids`
know where a sequence ends, and attend only within it. All rows have the same length, and nearly all
micro-batches the same number of rows, so recorded graphs can be reused. The rest of a row is filled
with a sequence without labels.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from wholebatch.batch.samples import Layout
from wholebatch.errors import SplitError

_IGNORED = -100
# Told by the positions, or by another length than that of the tokens.
_LEFT_OUT = ("attention_mask", "position_ids", "seq_idx")
_FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass(frozen=True)
class Segment:
    """One sequence of a batch: its row, where it begins there, and how many tokens it has."""

    row: int
    start: int
    length: int


@dataclass(frozen=True)
class PackedBatch:
    """The sequences of a batch, its token leaves, and the leaves that stay unchanged."""

    sequences: list[Segment]
    leaves: dict[str, Tensor]
    static: dict[str, Any]
    fillers: Mapping[str, float]
    is_padded: bool

    def micro_batch(self, rows: Sequence[Sequence[Segment]], length: int) -> dict[str, Any]:
        """Return rows of this length with these sequences in each."""
        first = next(iter(self.leaves.values()))
        places, positions = _places(rows, length, first.shape[1], self._longest)
        places, positions = places.to(first.device), positions.to(first.device)
        made: dict[str, Any] = dict(self.static)
        for name, leaf in self.leaves.items():
            taken = leaf.flatten(0, 1)[places.clamp(min=0)]
            empty = (places < 0).view(*places.shape, *[1] * (taken.dim() - 2))
            made[name] = taken.masked_fill(empty, self.fillers[name])
        if "labels" in made:  # a sequence's first token is not the next one of another
            made["labels"] = made["labels"].masked_fill(positions == 0, _IGNORED)
        made["position_ids"] = positions
        return made

    @property
    def _longest(self) -> int:
        return max(one.length for one in self.sequences)


def packed_micro_batches(
    layout: Layout, budget: int, pack: bool | int, lengths: list[int] | None
) -> list[tuple[dict[str, Any], list[int]]]:
    """Return packed micro-batches, each with the indices of its samples in the batch."""
    batch = sequences_of(layout, lengths)
    longest = batch._longest
    length = _row_length(longest, budget, pack)
    rows = _filled(batch.sequences, length)
    most = max(1, budget // length)
    made = []
    for start in range(0, len(rows), most):
        part = rows[start : start + most]
        step = -(-most // 2)  # the last one is half or full: two shapes, two graphs
        wanted = min(most, -(-len(part) // step) * step)
        numbers = [one.row for row in part for one in row]
        filled = [*part, *([[]] * (wanted - len(part)))]
        made.append((batch.micro_batch(filled, length), numbers))
    return made


def alone(layout: Layout, lengths: list[int] | None, count: int) -> tuple[list[Any], Any]:
    """Return sequences of middle length, each as it was given, and all of them in one row.

    Those of a batch that is packed already are in a row of their own.
    """
    batch = sequences_of(layout, lengths)
    ranked = sorted(batch.sequences, key=lambda one: one.length)
    few = ranked[max(0, len(ranked) // 2 - count // 2) :][:count]
    together = batch.micro_batch([few], sum(one.length for one in few) + 1)
    if batch.is_padded:
        return [layout.take([one.row]) for one in few], together
    return [batch.micro_batch([[one]], one.length) for one in few], together


def sequences_of(layout: Layout, lengths: list[int] | None) -> PackedBatch:
    """Return the sequences of a padded batch, or of one that is packed already."""
    values = {leaf.name: leaf.value for leaf in layout.leaves}
    tokens = values.get("input_ids", next(iter(values.values()), None))
    if not isinstance(tokens, Tensor) or tokens.dim() < 2 or any("." in name for name in values):
        raise SplitError(
            "tokens(pack=...): the batch must be a mapping of tensors [samples, tokens, ...], such "
            f"as input_ids and labels; it has {', '.join(values)}"
        )
    shape, leaves, static = tokens.shape[:2], {}, {}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.shape[:2] == shape:
            leaves[name] = value
        elif isinstance(value, Tensor) and value.dim() and name not in _FLASH:
            raise SplitError(
                f"tokens(pack=...): {name!r} is {tuple(value.shape)}, and the tokens are "
                f"{tuple(shape)}: a row holds several samples, so give one value for each token"
            )
        elif name not in _FLASH:
            static[name] = value
    packed = _packed_already(leaves.get("position_ids"))
    sequences = packed or []
    if packed is None:
        sequences = _padded(leaves, lengths or [shape[1]] * shape[0])
    leaves = {name: leaf for name, leaf in leaves.items() if name not in _LEFT_OUT}
    if "labels" not in leaves and "shift_labels" not in leaves and "input_ids" in leaves:
        leaves["labels"] = leaves["input_ids"]
    fillers = {name: _IGNORED if name in ("labels", "shift_labels") else 0 for name in leaves}
    return PackedBatch(sequences, leaves, static, fillers, packed is None)


def _packed_already(positions: Tensor | None) -> list[Segment] | None:
    """Return the sequences of rows whose positions begin again; None if none does."""
    if positions is None or positions.is_floating_point() or positions.dim() != 2:
        return None
    found = []
    for row, own in enumerate(positions.cpu()):
        starts = [0, *(own.diff() != 1).nonzero().flatten().add(1).tolist(), len(own)]
        found += [Segment(row, start, stop - start) for start, stop in pairwise(starts)]
    return found if len(found) > len(positions) else None


def _padded(leaves: Mapping[str, Tensor], lengths: Sequence[int]) -> list[Segment]:
    """Return the samples of a padded batch, which must begin with a real token and have no hole."""
    mask = leaves.get("attention_mask")
    if mask is not None:
        real, places = mask.cpu() != 0, torch.arange(mask.shape[1])
        holes = (~real & (places < torch.tensor(lengths)[:, None])).any(1)
        if bool(holes.any()):
            raise SplitError(
                f"tokens(pack=...): sample {int(holes.nonzero()[0])} has padding before its last "
                "token; pad on the right"
            )
    return [Segment(row, 0, length) for row, length in enumerate(lengths) if length]


def _row_length(longest: int, budget: int, pack: bool | int) -> int:
    """Return how many tokens a row has: as given, or a power of two, or 3/2 of one."""
    if longest > budget:
        raise SplitError(
            f"a sample is {longest} tokens long, more than the budget of {budget}: raise the "
            f"budget to {longest} or more, or shorten the samples"
        )
    if pack is not True:
        if longest > pack:
            raise SplitError(
                f"tokens(pack={pack}): a sample is {longest} tokens long; rows must be at least "
                "as long"
            )
        return min(pack, budget)
    power = 1 << max(longest - 1, 1).bit_length()
    return min(power * 3 // 4 if power * 3 // 4 >= longest else power, budget)


def _filled(sequences: Sequence[Segment], length: int) -> list[list[Segment]]:
    """Return rows of whole sequences: the longest first, each into the fullest row that it fits."""
    rows: list[list[Segment]] = []
    spaces: list[tuple[int, int]] = []  # what is left of a row, and which, in order
    for one in sorted(sequences, key=lambda one: -one.length):
        at = bisect_left(spaces, (one.length, -1))
        if at == len(spaces):
            left, row = length, len(rows)
            rows.append([])
        else:
            left, row = spaces.pop(at)
        rows[row].append(one)
        if left > one.length:
            insort(spaces, (left - one.length, row))
    return rows


def _places(
    rows: Sequence[Sequence[Segment]], length: int, width: int, longest: int
) -> tuple[Tensor, Tensor]:
    """Return where each token of the rows is in the flattened batch (-1: nowhere), and its place.

    Fillers are sequences, too, none longer than the longest real one: a model may know no more
    positions.
    """
    segments = [one for row in rows for one in row]
    offsets = [list(accumulate((one.length for one in row), initial=0)) for row in rows]
    into = torch.tensor(
        [index * length + at for index, own in enumerate(offsets) for at in own[:-1]]
    )
    source = torch.tensor([one.row * width + one.start for one in segments])
    lengths = torch.tensor([one.length for one in segments], dtype=torch.long)
    within = torch.arange(int(lengths.sum()))
    within -= (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    target = into.long().repeat_interleave(lengths) + within
    places = torch.full((len(rows) * length,), -1, dtype=torch.long)
    places[target] = source.long().repeat_interleave(lengths) + within
    filled = torch.tensor([own[-1] for own in offsets])[:, None]
    positions = ((torch.arange(length) - filled) % longest).flatten()
    positions[target] = within
    return places.view(len(rows), length), positions.view(len(rows), length)
