"""What every loop is given: the same model, optimizer, loss and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _push_mode
from torch.utils.data import DataLoader, IterableDataset

from wholebatch.loss import Loss, as_loss
from wholebatch.memory.meter import MemoryMeter
from wholebatch.splitting import split

__all__ = ["Job"]


@dataclass
class Job:
    """A batch to train on in micro-batches, and everything that a loop needs for that."""

    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
    """The model, on its device, and its optimizer: made anew for every loop."""
    loss: Callable[[Any, Any], Any]
    batches: Callable[[], Any]
    """The next whole batch, on the host; all of one size."""
    micro_batch: int
    device: torch.device
    precision: str = "full"
    clip_norm: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """What else `WholeBatch` takes: `units`, `batchnorm`, `static`, …"""
    meter: MemoryMeter | None = field(default=None, init=False)
    is_compiled: bool = field(default=False, init=False)
    """Whether the loop that runs now makes its tensors where no meter sees them."""

    def __post_init__(self) -> None:
        self.first = self.batches()
        self.steps = len(split(self.first, self.micro_batch, static=self._static))

    @property
    def _static(self) -> Any:
        return self.options.get("static", ())

    def micro_batches(self, *, whole: bool = False) -> Iterator[Any]:
        """Without end: those of one batch after the other; with `whole` the batches themselves.

        Every loop begins with the same batch, so that their first gradients can be compared.
        """
        batch = self.first
        while True:
            if whole:
                yield batch
            else:
                yield from split(batch, self.micro_batch, static=self._static)
            batch = self.batches()

    def loader(self) -> DataLoader[Any]:
        """The same micro-batches as a DataLoader, which is what frameworks take."""
        return DataLoader(self.dataset(), batch_size=None, pin_memory=self.device.type == "cuda")

    def dataset(self) -> IterableDataset[Any]:
        """The same micro-batches as a dataset."""
        return _Stream(self)

    def mean(self, model: Any, micro: Any) -> Tensor:
        """The mean over the micro-batch's own units: what every other loop takes as the loss."""
        self.meet()
        found = as_loss(self.loss(model, micro))
        if isinstance(found, Loss):
            return found.total / found.units
        parts = [term.weight * term.total / term.units for term in found.by_name.values()]
        return torch.stack(parts).sum()

    def meet(self) -> None:
        """Let the meter see this thread: some frameworks run their loop in one of its own."""
        if self.meter is not None and self.meter not in _get_current_dispatch_mode_stack():
            _push_mode(self.meter)

    def autocast(self) -> torch.autocast:
        """For loops that are written by hand."""
        dtype = torch.float16 if self.precision == "fp16" else torch.bfloat16
        return torch.autocast(self.device.type, dtype=dtype, enabled=self.precision != "full")

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _Stream(IterableDataset[Any]):
    def __init__(self, job: Job) -> None:
        self._job = job

    def __iter__(self) -> Iterator[Any]:
        return self._job.micro_batches()
