"""A whole batch, its micro-batches, and the same samples in another order or format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wholebatch.batch import batch_size_of, joined, split
from wholebatch.batch.samples import flatten, layout_of, tensors_of
from wholebatch.errors import OptionError, WholebatchError

NOT_SHIFTED = "labels that are not shifted"


@dataclass(frozen=True)
class DividedBatch:
    """A whole batch, the size of its micro-batches, and how its samples are found."""

    whole: Any
    micro_batch: Any = None
    batch_size: int | Callable[[Any], int] | None = None
    static: str | Sequence[str] = ()

    @property
    def samples(self) -> int:
        return batch_size_of(self.whole, batch_size=self.batch_size, static=self.static)

    def micro_batches(self) -> list[Any]:
        return split(self.whole, self.micro_batch, batch_size=self.batch_size, static=self.static)

    def really_divided(self) -> DividedBatch:
        """Return the batch in about four uneven parts, if no size was given."""
        samples, micro_batch = self.samples, self.micro_batch
        if samples < 2:
            raise OptionError("a batch of one sample: there is nothing to divide")
        if micro_batch is None or micro_batch == "auto":
            return replace(self, micro_batch=_uneven(samples))
        if isinstance(micro_batch, int) and micro_batch >= samples:
            raise OptionError(
                f"micro_batch={micro_batch}: is the whole batch of {samples} samples, so nothing "
                "would be split or proven; give fewer"
            )
        return self

    def first(self, samples: int) -> DividedBatch:
        """Return the first samples; a micro-batch as large as all of them is made smaller."""
        layout = layout_of(self.whole, batch_size=self.batch_size, static=self.static)
        size = samples if isinstance(self.batch_size, int) else self.batch_size
        is_whole = isinstance(self.micro_batch, int) and self.micro_batch >= samples
        micro_batch = _uneven(samples) if is_whole else self.micro_batch
        part = layout.take(slice(samples))
        return replace(self, whole=part, micro_batch=micro_batch, batch_size=size)

    def in_other_orders(self) -> list[Any]:
        """Return the whole batch with its samples reversed, and shuffled."""
        generator = torch.Generator().manual_seed(0)
        layout = layout_of(self.whole, batch_size=self.batch_size, static=self.static)
        shuffled = torch.randperm(self.samples, generator=generator).tolist()
        return [layout.take(order) for order in (list(reversed(range(self.samples))), shuffled)]

    def in_float64(self) -> DividedBatch:
        """Return the batch with its floating-point tensors in float64."""
        leaves, structure = flatten(self.whole)
        values = [leaf.value for leaf in leaves]
        floats = [isinstance(value, Tensor) and value.is_floating_point() for value in values]
        wide = [v.double() if is_float else v for v, is_float in zip(values, floats, strict=True)]
        return replace(self, whole=structure.build(wide))


def _uneven(samples: int) -> int:
    """Return a size that makes about four micro-batches, of which the last is smaller."""
    size = -(-samples // 4)
    return size if samples % size or size == 1 else max(1, size - 1)


def whole_of(micros: Sequence[Any]) -> Any | None:
    """Return the batch that micro-batches are parts of; None if they do not fit together."""
    try:
        return joined(micros)
    except (WholebatchError, RuntimeError, IndexError, TypeError):  # such as other paddings
        return None


def counts_of(micro: Any) -> dict[str, float]:
    """Return what may be counted in a micro-batch instead of the units of its loss."""
    try:
        tensors = [value for value in tensors_of(micro) if value.dim() > 0]
    except (WholebatchError, TypeError):
        return {}
    counts = {"samples": float(len(tensors[0]))} if tensors else {}
    tokens = [v for v in tensors if v.dim() > 1 and not v.is_floating_point()]
    if tokens:
        counts["tokens, with padding"] = float(tokens[-1].shape[:2].numel())
        counts[NOT_SHIFTED] = float((tokens[-1] != -100).sum())
    return counts


def other_counts(ranks: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, list[list[float]]]:
    """Return by name what may be counted in the micro-batches of each rank, if all have it."""
    every = [counts for row in ranks for counts in row]
    names = [name for name in every[0] if all(name in counts for counts in every)] if every else []
    return {name: [[counts[name] for counts in row] for row in ranks] for name in names}
