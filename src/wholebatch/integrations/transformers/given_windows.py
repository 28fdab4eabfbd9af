"""Windows whose batches a trainer reads in advance, and whose step it makes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from wholebatch.audit.foreign_writes import ForeignWrites
from wholebatch.batch import Batches
from wholebatch.losses.loss import SINGLE
from wholebatch.whole_batch import WholeBatch
from wholebatch.window.close import Handover
from wholebatch.window.forward_state import attributes_restored
from wholebatch.window.window import Step


class GivenWindows(WholeBatch):
    """A WholeBatch whose window is a list of batches; the trainer clips, steps and clears.

    A run of the loss may change attributes of `host`, such as a trainer's metrics; after a
    test, numbers and small containers among them are put back.

    >>> import wholebatch as wb
    >>> model = torch.nn.Linear(3, 2)
    >>> windows = GivenWindows(
    ...     model,
    ...     torch.optim.SGD(model.parameters(), lr=0.1),
    ...     loss=lambda model, micro: wb.cross_entropy(model(micro["x"]), micro["y"]),
    ...     micro_batch=4,
    ... )
    >>> batches = [{"x": torch.randn(n, 3), "y": torch.randint(0, 2, (n,))} for n in (6, 3)]
    >>> shares = windows.make_gradient(batches, updates=0)
    >>> len(shares), windows.last_step.micro_batches, windows.last_step.units
    (2, 3, 9.0)
    >>> bool(torch.isclose(sum(shares), torch.tensor(windows.last_step.loss)))
    True
    """

    _handover = Handover(lends=True)  # the trainer clears them before the next window

    def __init__(
        self,
        *arguments: Any,
        host: object = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._host = host
        self._announced: dict[str, float] | None = None
        self._shares = torch.zeros(0)
        self.extras: dict[str, Tensor] = {}
        """The tensors beside the losses (`wb.Loss(extras=)`), summed over each batch."""
        self._writes = ForeignWrites(self._ledger.target)

    def make_gradient(
        self, batches: Sequence[Any], *, updates: int, units: float | None = None
    ) -> Sequence[Tensor]:
        """Leave the gradient of this window in `.grad`; return each batch's share of its mean.

        `updates` is how many the trainer has made so far, `units` what it has counted over all
        ranks, if it has. The shares are on the device; their average over the ranks is the window's
        mean loss.
        """
        self._announced = None if units is None else {SINGLE: units}
        self._ledger.count_from(updates)
        self._batches = len(batches)
        replica = self.model if isinstance(self.model, DistributedDataParallel) else None
        with nullcontext() if replica is None else replica.no_sync():
            step = self.gradient(Batches(batches))
        self._writes.forget()
        if step.skipped is None:
            self._writes.remember(self._ledger.target.trained())
        return self._shares.unbind()

    def _known_units(self, micros: Sequence[Any]) -> dict[str, float] | None:
        is_announced = self._announced is not None and self._count is not None
        return self._announced if is_announced else super()._known_units(micros)

    def _test(self, batch: Any, micros: Sequence[Any]) -> None:
        in_parts = len(micros) > 1 or self._ledger.sync.ranks > 1
        runs = in_parts and self._host is not None and self._runner.tests_next_window
        with attributes_restored(self._host) if runs else nullcontext():
            super()._test(batch, micros)

    def _close(self, micros: Sequence[Any], steps: bool) -> Step:
        device, micro_batches = self._ledger.target.device, self._ledger.micro_batches
        totals = [total for micro in micro_batches for total in micro.totals(SINGLE)]
        owners = [micro.index for micro in micro_batches for _ in micro.totals(SINGLE)]
        sums = torch.zeros(self._batches, dtype=torch.float64, device=device)
        self.extras = {}
        dtype = torch.float32
        is_one = self._runner.is_coupled or not totals  # one loss of the whole batch
        if not is_one:  # before the close, which waits for the device
            losses = torch.stack([torch.as_tensor(total, device=device) for total in totals])
            batch_of = self._fitting.sizes.batch_of_each()
            places = torch.tensor([batch_of[owner] for owner in owners]).to(
                device, non_blocking=True
            )
            sums.index_add_(0, places, losses.double())
            for name in self._runner.extras[0] if self._runner.extras else ():
                values = torch.stack([extras[name] for extras in self._runner.extras]).double()
                self.extras[name] = torch.zeros_like(sums).index_add_(0, places, values)
            dtype = losses.dtype
        step = super()._close(micros, steps)
        if is_one:
            sums[0] = step.loss
        else:
            sums *= self._ledger.sync.ranks / step.units
        self._shares = sums.to(dtype)
        return step

    def check_untouched(self) -> None:
        """Refuse to go on if others have written the gradient since `make_gradient`."""
        self._writes.check()
        self._writes.check_rates()

    def release(self) -> None:
        """Free the memory of graphs and gradients; another window makes them again."""
        self._runner.executor.release()

    def detach(self) -> None:
        """Leave the model as it was found."""
        if self._runner.policy is not None:
            self._runner.policy.detach()
