"""Removal of the samples that a sampler repeats to give every rank the same number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from wholebatch.core.splitting.micro_batches import drop_samples
from wholebatch.core.splitting.samples import Static
from wholebatch.errors import UnsupportedError

__all__ = ["Unpadded", "unpadded"]


@dataclass(frozen=True)
class Unpadded:
    """A loader without this rank's repeated samples; made by `unpadded`."""

    loader: DataLoader[Any]
    kept: int
    """The number of this rank's samples that are not repeats: always its first ones."""
    given: int
    """The number of samples that the sampler gives this rank, repeats included."""
    batch_size: int
    static: Static = ()
    start: int = 0

    @property
    def sampler(self) -> Any:
        """Return the DistributedSampler, so that `loader.sampler.set_epoch(epoch)` still works."""
        return getattr(self.loader.batch_sampler, "sampler", None)

    def __len__(self) -> int:
        return min(len(self.loader), -(-self.kept // self.batch_size))

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.loader, self.start):
            start = index * self.batch_size
            size = min(self.batch_size, self.given - start)
            kept = min(size, self.kept - start)
            if kept == size:
                yield batch
            elif kept > 0:
                yield drop_samples(batch, kept, batch_size=size, static=self.static)


def unpadded(loader: Iterable[Any], *, static: Static = (), start: int = 0) -> Iterable[Any]:
    """Return `loader` with each sample of the dataset on exactly one rank.

    `DistributedSampler(drop_last=False)` repeats the first samples until every rank has the same
    number. Counted twice, they would bias the update. Here they are dropped, so ranks may differ by
    one sample (and by one batch, if a batch held only a repeat). Loaders that repeat nothing are
    returned unchanged.

    `static` is the option of `split`. `start` is the number of batches already taken, for a loader
    that resumes in the middle of an epoch by itself.
    """
    if not isinstance(loader, DataLoader):
        return loader
    batches = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return loader
    size = len(sampler.dataset)  # type: ignore[arg-type]
    if sampler.total_size == size:
        return loader
    if type(sampler).__iter__ is not DistributedSampler.__iter__:
        raise UnsupportedError(
            f"{type(sampler).__name__} repeats samples to fill a rank in an order of its own, so "
            "the repeats cannot be found: use drop_last=True, or DistributedSampler itself"
        )
    if batches is None or type(batches) is not BatchSampler:
        how = "with batch_size=None" if batches is None else f"with {type(batches).__name__}"
        raise UnsupportedError(
            f"a DataLoader {how} does not say which samples are in a batch, so those that the "
            "DistributedSampler repeats cannot be dropped: give DataLoader(batch_size=..., "
            "sampler=...), or DistributedSampler(drop_last=True)"
        )
    # Rank r has the indices r, r + R, r + 2R, ... of the padded order; those below `size` are real.
    kept = len(range(sampler.rank, size, sampler.num_replicas))
    return Unpadded(loader, kept, sampler.num_samples, batches.batch_size, static, start)
