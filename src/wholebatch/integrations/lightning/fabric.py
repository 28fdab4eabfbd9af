"""Exact windows in a loop over Lightning's Fabric."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from wholebatch.core.close import Policy
from wholebatch.core.loss import Loss, Units
from wholebatch.errors import OptionError, WindowError
from wholebatch.integrations.host_window import Given, Hosted, Options, Settled, all_parameters
from wholebatch.integrations.lightning.strategies import (
    REPLICATED,
    check_strategy,
    gradients_of,
    scales,
)

__all__ = ["FabricWindows"]


class FabricWindows:
    """Every update of a loop over Fabric is that of the undivided global batch.

    ```python
    windows = FabricWindows(fabric, model, optimizer)
    for index, batch in enumerate(loader):
        last = (index + 1) % steps == 0 or index + 1 == len(loader)
        with fabric.no_backward_sync(model, enabled=not last):
            loss = F.cross_entropy(model(batch["x"]), batch["y"])           # the mean
            windows.backward(mean=loss, units=len(batch["y"]), last=last)   # was fabric.backward
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    ```

    `backward(total, units=...)` takes a sum, `backward(mean=..., units=...)` a mean, and a
    `wb.Loss` is taken too. `last=True` completes the window: when it returns, the gradients are
    those of the whole batch on all ranks, and Fabric's clipping, loss scale and step go on from
    there. A loss or gradient that is not finite raises `NonFiniteError`, and no gradient is left;
    with `nonfinite="skip"` the loop's step then changes nothing.
    """

    def __init__(
        self,
        fabric: Fabric,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        batchnorm: str = "refuse",
        zero_units: Policy = "raise",
        nonfinite: Policy = "raise",
        audit: bool = True,
    ) -> None:
        if not isinstance(fabric, Fabric):
            raise OptionError(f"fabric={type(fabric).__name__}: must be a lightning.fabric.Fabric")
        check_strategy(fabric.strategy)
        self._fabric = fabric
        self._model = model
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            raise OptionError(
                f"optimizer={type(optimizer).__name__}: must be what fabric.setup returned"
            )
        self._optimizer: torch.optim.Optimizer = inner
        self._audit = audit
        self._window = Hosted(
            [model],
            [inner],
            device=fabric.device,
            options=Options(batchnorm, zero_units, nonfinite, audit),
            gradients=gradients_of(fabric.strategy),
            is_scaled=lambda: scales(fabric.strategy.precision),
        )
        self._optimizer.register_step_pre_hook(self._refuse_open_window)

    @property
    def updates(self) -> int:
        """Windows that were completed so far."""
        return self._window.updates

    @property
    def last(self) -> Settled | None:
        """The window that was completed last."""
        return self._window.last

    @property
    def skipped(self) -> int:
        """Windows that made no update (not finite, or without units)."""
        return self._window.skipped

    def backward(
        self,
        total: Tensor | Loss | None = None,
        *,
        units: Units | None = None,
        mean: Tensor | None = None,
        last: bool,
        **kwargs: Any,
    ) -> Settled | None:
        """Make the backward of one micro-batch's loss; `last` completes the window."""
        given = Given.of(total, units, mean, audit=self._audit)
        self._window.weigh(given, is_last=last)
        with self._window.backward():
            self._fabric.backward(given.loss, **kwargs)
        return self._window.settle(averaged_by=self._window.ranks.size) if last else None

    def discard(self) -> None:
        """Forget the open window, after an error; `optimizer.zero_grad()` is the loop's."""
        self._window.discard()

    def state_dict(self) -> dict[str, Any]:
        """For `fabric.save(path, {"windows": windows, ...})`: an open window is kept whole."""
        strategy = type(self._fabric.strategy).__name__
        if self._window.is_open and strategy not in REPLICATED:
            raise WindowError(
                f"the window is open with {self._window.micro_batches} micro-batches, and its "
                f"gradients are inside {strategy}: save between windows"
            )
        return self._window.state_dict(all_parameters([self._model], [self._optimizer]))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._window.load_state_dict(state, all_parameters([self._model], [self._optimizer]))

    def _refuse_open_window(self, *_: Any) -> None:
        if self._window.is_open:
            raise WindowError(
                "optimizer.step() while the window is open: its last micro-batch's backward must "
                "say last=True"
            )
