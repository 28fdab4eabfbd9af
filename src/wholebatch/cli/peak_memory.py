"""The peak memory of a window, beside the prediction for the whole batch at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from wholebatch.cli.report.terminal_output import bytes_said
from wholebatch.errors import WholebatchError
from wholebatch.memory.meter import MemoryMeter, reset_cuda_peak
from wholebatch.memory.predict import predict_peak

__all__ = ["PeakMemory"]


# Windows, whatever they were: the meter is slow. Plain SGD never has a state, and batches may all
# be short.
_ENOUGH = 4


class PeakMemory:
    """Measures a run: CUDA's allocator keeps its own peak, on the CPU a few windows are metered.

    Metered until one whole window after the first was, with the optimizer's state there already:
    the first makes that state at its end, and so shows less than all later ones use. One of a full
    batch, if it comes soon: the last one of an epoch may be short.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, device: torch.device
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._device = device
        self._measured: int | None = None
        self._is_first = True
        self._metered = 0
        self.settled = self._device.type != "cpu"
        if self._device.type == "cuda":
            reset_cuda_peak(self._device)

    @contextmanager
    def around(self, *, whole_window: bool, full_batch: bool = True) -> Iterator[None]:
        """Measure one window."""
        if self.settled:
            yield
            if self._device.type == "cuda":  # a micro-batch that may grow starts it anew
                self._measured = max(
                    self._measured or 0, torch.cuda.max_memory_allocated(self._device)
                )
            return
        has_state = bool(self._optimizer.state)
        with MemoryMeter(model=self._model, optimizer=self._optimizer) as meter:
            yield
        self._metered += 1
        # A run's first window begins with a look at the model, which may take more than a step.
        before = 0 if self._metered <= 2 or self._measured is None else self._measured
        self._measured = max(meter.peak, before)
        self._is_first = not has_state
        is_usual = has_state and whole_window and full_batch and self._metered > 1
        self.settled = is_usual or self._metered >= _ENOUGH

    @property
    def measured(self) -> int | None:
        """The most bytes of tensors alive at one moment; None where nothing can tell."""
        return self._measured

    def share_text(self) -> str:
        """Return the measurement of a rank that has only its share of the batch."""
        measured = self.measured
        if measured is None:
            return "not measured"
        return f"{bytes_said(measured)} measured on the first rank"

    def text(self, loss: Callable[[Any, Any], Any], batch: Any, *, precision: str) -> str:
        """Return both numbers in one line; `batch` is a whole one."""
        measured = self.measured
        here = "not measured on this device" if measured is None else f"{bytes_said(measured)}"
        try:
            whole = predict_peak(
                self._model,
                loss,
                batch,
                optimizer=self._optimizer,
                precision=precision,
                micro_batches=1,
                first=self._is_first and self._device.type == "cpu",
            ).peak
        except WholebatchError as error:
            return f"{here}; for the whole batch at once: {error}"
        except (
            Exception
        ) as error:  # a loss that cannot run without numbers: only the report is poorer
            reason = str(error).strip().split("\n")[0][:120]
            return f"{here}; for the whole batch at once it cannot be predicted ({reason})"
        less = f" ({whole / measured:.1f}×)" if measured else ""
        return f"{here} measured; {bytes_said(whole)} predicted for the whole batch at once{less}"
