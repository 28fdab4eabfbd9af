"""The input of every loop: the same model, optimizer, loss and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _push_mode
from torch.utils.data import DataLoader, IterableDataset

from wholebatch.core.loss import Loss, as_loss
from wholebatch.core.splitting import split
from wholebatch.memory.meter import MemoryMeter

__all__ = ["Job"]


@dataclass
class Job:
    """A batch to train on in micro-batches, and everything that a loop needs."""

    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
    """Returns the model, on its device, and its optimizer; called once for every loop."""
    loss: Callable[[Any, Any], Any]
    batches: Callable[[], Any]
    """Returns the next whole batch, in host memory; all have the same size."""
    micro_batch: int
    device: torch.device
    precision: str = "full"
    clip_norm: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other options of `WholeBatch`, such as `units`, `batchnorm` and `static`."""
    meter: MemoryMeter | None = field(default=None, init=False)
    is_compiled: bool = field(default=False, init=False)
    """True if the current loop allocates tensors where no meter sees them."""

    def __post_init__(self) -> None:
        self.first = self.batches()
        self.steps = len(split(self.first, self.micro_batch, static=self._static))

    @property
    def _static(self) -> Any:
        return self.options.get("static", ())

    def micro_batches(self, *, whole: bool = False) -> Iterator[Any]:
        """Yield micro-batches of one batch after the other, without end; with `whole`, the batches.

        Every loop begins with the same batch, so that the first gradients can be compared.
        """
        batch = self.first
        while True:
            if whole:
                yield batch
            else:
                yield from split(batch, self.micro_batch, static=self._static)
            batch = self.batches()

    def loader(self) -> DataLoader[Any]:
        """Return the same micro-batches as a DataLoader, for frameworks."""
        return DataLoader(self.dataset(), batch_size=None, pin_memory=self.device.type == "cuda")

    def dataset(self) -> IterableDataset[Any]:
        """Return the same micro-batches as a dataset."""
        return _Stream(self)

    def mean(self, model: Any, micro: Any) -> Tensor:
        """Return the mean over the micro-batch's own units: the loss of every other loop."""
        self.meet()
        found = as_loss(self.loss(model, micro))
        if isinstance(found, Loss):
            return found.total / found.units
        parts = [term.weight * term.total / term.units for term in found.by_name.values()]
        return torch.stack(parts).sum()

    def meet(self) -> None:
        """Activate the meter in this thread: some frameworks run their loop in another one."""
        if self.meter is not None and self.meter not in _get_current_dispatch_mode_stack():
            _push_mode(self.meter)

    def autocast(self) -> torch.autocast:
        """Return the autocast context for manual loops."""
        dtype = torch.float16 if self.precision == "fp16" else torch.bfloat16
        return torch.autocast(self.device.type, dtype=dtype, enabled=self.precision != "full")

    def wait(self) -> None:
        """Wait until the device has finished all work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _Stream(IterableDataset[Any]):
    def __init__(self, job: Job) -> None:
        self._job = job

    def __iter__(self) -> Iterator[Any]:
        return self._job.micro_batches()
