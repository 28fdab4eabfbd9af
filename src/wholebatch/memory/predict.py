"""The peak memory of a training step at a micro-batch size, without running it.

```python
prediction = predict_peak(model, loss, micro, optimizer=optimizer, precision="bf16")
prediction.peak, prediction.by_category["activations"]
```

A whole window (forward and backward of the micro-batches, the update) runs on fake tensors, which
have shapes but no bytes, under the same meter that counts a real run. On the CPU the two agree to
the byte.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from wholebatch import precision as precisions
from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.loss import Loss, as_loss
from wholebatch.memory.fake import (
    FakeMeter,
    fake_batch,
    fake_mode_of,
    fake_model,
    fake_optimizer,
)
from wholebatch.memory.meter import MemoryMeter

__all__ = ["PlainWindow", "Prediction", "predict_peak", "target_device"]

CUDA_GRANULE = 512
"""CUDA's caching allocator hands out blocks of multiples of this many bytes."""

CUDA_WORKSPACES = 64 * 2**20
"""What cuBLAS and cuBLASLt keep for themselves on a Hopper GPU: 32 MiB each (less on others)."""


@dataclass(frozen=True)
class Prediction:
    """The bytes that a training step will have alive at its peak, and what they are for."""

    peak: int
    by_category: dict[str, int]
    seconds: float
    """How long the prediction took."""
    largest: int = 0
    """The largest single piece that the step asks for. An allocator that cannot move memory needs
    room for one more of these: what is free is in pieces."""


def predict_peak(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    precision: str = "full",
    micro_batches: int = 2,
    device: torch.device | str | None = None,
    first: bool = False,
) -> Prediction:
    """The peak of a training step with micro-batches like `batch`, as (bytes, by category).

    The step is one of a run that goes on: the optimizer's state is there already (`first=True`
    asks for the first step instead, which makes it). From the second micro-batch on, gradients
    are there while the next forward and backward run, so two stand for any larger number.

    The model may live on any device, also `meta`; it is neither run nor changed. `device` is
    where the step would run (default: where the model is). For a CUDA device that this machine
    does not have, the CPU's operations are counted with CUDA's block sizes.
    """
    if micro_batches < 1:
        raise OptionError(f"micro_batches={micro_batches}: must be at least 1")
    began = time.perf_counter()
    target = target_device(model, device)
    on_cuda = target.type == "cuda"
    run_on = target if not on_cuda or torch.cuda.is_available() else torch.device("cpu")
    fake = fake_mode_of(model)
    copied, parameters = fake_model(model, fake, run_on)
    stepping = None
    if optimizer is not None:
        stepping = fake_optimizer(optimizer, fake, run_on, parameters, on_cuda=on_cuda)
    micro = fake_batch(fake, batch, run_on)
    meter = FakeMeter(
        model=copied, optimizer=stepping, device=run_on, granule=CUDA_GRANULE if on_cuda else 1
    )
    with _untouched(model), _quiet(), fake, meter:
        window = PlainWindow(
            copied, loss, optimizer=stepping, precision=precision, around_update=meter.answering
        )
        micros = [micro] * min(micro_batches, 2)  # the third finds what the second did
        try:
            if first or stepping is None:
                window.run(micros)
                by_category = meter.peak_by_category
            else:
                by_category = _later(window, micros, meter)
        except (
            DataDependentOutputException,
            DynamicOutputShapeException,
            UnsupportedOperatorException,
        ) as error:
            raise UnsupportedError(_why_not(error)) from error
    if on_cuda:
        by_category["temporaries"] += CUDA_WORKSPACES
    peak = sum(by_category.values())
    return Prediction(peak, by_category, time.perf_counter() - began, meter.largest)


def _later(window: PlainWindow, micros: Sequence[Any], meter: MemoryMeter) -> dict[str, int]:
    """The peak of a window that finds the optimizer's state there, from the first one.

    State is made by the first step and lies beside everything from then on. So the forwards and
    backwards of a later window take what those of the first did, and the state; its step takes
    what a second step with the same gradients does.
    """
    state = "optimizer state"
    window.add_all(micros)
    before = meter.peak_by_category
    held = meter.current_by_category[state]
    largest = meter.largest
    window.step()
    before[state] += meter.current_by_category[state] - held
    meter.reset_peak()
    window.step()
    after = meter.peak_by_category
    meter.note_largest(largest)
    return before if sum(before.values()) >= sum(after.values()) else after


class PlainWindow:
    """A window as plain as can be: forwards and backwards, then the update; nothing is normalised.

    It allocates what a window of the library allocates, up to a few scalars.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[[Any, Any], Any],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        precision: str = "full",
        around_update: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._model = model
        self._loss = loss
        self._optimizer = optimizer
        self._around_update = around_update
        self._casts = precisions.choose(precision, next(model.parameters()).device.type)
        self._sixteen_bit = precisions.SixteenBit([] if optimizer is None else [optimizer])

    def run(self, micros: Sequence[Any]) -> None:
        """Train on these micro-batches once."""
        self.add_all(micros)
        self.step()
        self.clear()

    def add_all(self, micros: Sequence[Any]) -> None:
        """Everything before the optimizer's step."""
        self._sixteen_bit.begin()
        self._casts.begin()
        for micro in micros:
            self._add(micro)
        self._casts.end()
        self._sixteen_bit.round_once()

    def _add(self, micro: Any) -> None:
        with self._casts.forward():
            result = as_loss(self._loss(self._model, micro))
        totals = (
            [result.total]
            if isinstance(result, Loss)
            else [term.total for term in result.by_name.values()]
        )
        torch.autograd.backward(totals)

    def step(self) -> None:
        """The optimizer's step; gradients stay."""
        if self._optimizer is not None:
            with self._around_update():
                self._optimizer.step()

    def clear(self) -> None:
        """Drop the gradients."""
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)
        self._sixteen_bit.end()


def target_device(model: torch.nn.Module, device: torch.device | str | None) -> torch.device:
    """Where the step is to run: as asked, or where the model is; a meta model would be on a CPU."""
    if device is not None:
        return torch.device(device)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")


@contextmanager
def _untouched(model: torch.nn.Module) -> Iterator[None]:
    """Refuse a loss that reaches the real model past its argument: it would get fake gradients."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        reached = [parameter for parameter, before in gradients if parameter.grad is not before]
        for parameter, before in gradients:
            parameter.grad = before
    if reached:
        raise UnsupportedError(
            "memory cannot be predicted for this loss: it uses a model from outside instead of the"
            " one it is given; write it as a function of its first argument, loss(model, micro)"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Code that asks where a tensor lies gets a warning for a fake one, and the answer nowhere."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


def _why_not(error: Exception) -> str:
    operation = getattr(error, "func", error)
    return (
        f"memory cannot be predicted for this loss: {operation} reads numbers out of a tensor"
        " (.item(), .tolist(), an if on its values, indexing by a mask), and a prediction has"
        " shapes but no numbers; use torch.where or masks of fixed shape, or give the micro-batch"
        " size as a number"
    )
