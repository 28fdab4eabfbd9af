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
from typing import Any, Literal, TypeAlias

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from wholebatch import precision as precisions
from wholebatch.coupled import batchnorms, tracked_instance_norms
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
from wholebatch.memory.stores import Elsewhere, check_gradients, held_on_device
from wholebatch.runners.lockstep import Hold, LockStep
from wholebatch.sync.buckets import Buckets

__all__ = ["PlainWindow", "Prediction", "Reduction", "predict_peak", "target_device"]

Reduction: TypeAlias = Literal["overlap", "after"]

_ENOUGH_IN_LOCK_STEP = 3
"""Micro-batches in lock-step that are really looked at; from there on each adds the same."""

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
    lock_step: Hold | None = None,
    reduction: Reduction | None = None,
    gradients: str = "device",
) -> Prediction:
    """The peak of a training step with micro-batches like `batch`, as (bytes, by category).

    The step is one of a run that goes on: the optimizer's state is there already (`first=True`
    asks for the first step instead, which makes it). From the second micro-batch on, gradients
    are there while the next forward and backward run, so two stand for any larger number.

    `lock_step` says what is held of micro-batches that meet at every BatchNorm ("graphs",
    "inputs"); all `micro_batches` then count. `reduction` adds the buckets in which data-parallel
    ranks sum their gradients: "overlap" in the last backward, or "after" it. `gradients` says where
    they go, as `WholeBatch` has it ("host" gains nothing where the host is the device).

    The model may live on any device, also `meta`; it is neither run nor changed. `device` is
    where the step would run (default: where the model is). For a CUDA device that this machine
    does not have, the CPU's operations are counted with CUDA's block sizes.
    """
    if micro_batches < 1:
        raise OptionError(f"micro_batches={micro_batches}: must be at least 1")
    check_gradients(gradients)
    began = time.perf_counter()

    def run(count: int) -> _Ran:
        return _run_on_fakes(
            model,
            loss,
            batch,
            optimizer=optimizer,
            precision=precision,
            micro_batches=count,
            target=target_device(model, device),
            first=first,
            lock_step=lock_step,
            # What has left the device is reduced a bucket at a time, at the close.
            reduction=reduction if gradients == "device" else None,
            gradients=gradients,
        )

    if lock_step is None:
        ran = run(min(micro_batches, 2))  # the third finds what the second did
    elif micro_batches <= _ENOUGH_IN_LOCK_STEP:
        ran = run(micro_batches)
    else:
        ran = _continued(
            run(_ENOUGH_IN_LOCK_STEP - 1),
            run(_ENOUGH_IN_LOCK_STEP),
            micro_batches - _ENOUGH_IN_LOCK_STEP,
        )
    by_category = max(ran.adding, ran.stepping, key=lambda one: sum(one.values()))
    return Prediction(
        sum(by_category.values()), by_category, time.perf_counter() - began, ran.largest
    )


@dataclass(frozen=True)
class _Ran:
    """The peaks, by category, of a window's two halves, and its largest single piece."""

    adding: dict[str, int]
    stepping: dict[str, int]
    largest: int


def _run_on_fakes(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | None,
    precision: str,
    micro_batches: int,
    target: torch.device,
    first: bool,
    lock_step: Hold | None,
    reduction: Reduction | None,
    gradients: str,
) -> _Ran:
    on_cuda = target.type == "cuda"
    run_on = target if not on_cuda or torch.cuda.is_available() else torch.device("cpu")
    fake = fake_mode_of(model)
    copied, parameters = fake_model(model, fake, run_on)
    stepping = None
    if optimizer is not None:
        stepping = fake_optimizer(optimizer, fake, run_on, parameters, on_cuda=on_cuda)
    if lock_step is None:
        micros = [fake_batch(fake, batch, run_on)] * micro_batches
    else:  # all are there at once
        micros = [fake_batch(fake, batch, run_on) for _ in range(micro_batches)]
    meter = FakeMeter(
        model=copied, optimizer=stepping, device=run_on, granule=CUDA_GRANULE if on_cuda else 1
    )
    with _untouched(model), _quiet(), fake, meter:
        window = PlainWindow(
            copied,
            loss,
            optimizer=stepping,
            precision=precision,
            around_update=meter.answering,
            lock_step=lock_step,
            reduction=reduction,
            sent=lambda flat: meter.mark("communication", [flat]),
            gradients="device" if gradients == "host" and not on_cuda else gradients,
        )
        # Lock-step reads counts of samples, as an optimizer its steps; a loss may read nothing.
        numbers = meter.answering() if lock_step is not None else nullcontext()
        try:
            with numbers:
                ran = _halves(window, micros, meter, is_first=first or stepping is None)
        except (
            DataDependentOutputException,
            DynamicOutputShapeException,
            UnsupportedOperatorException,
        ) as error:
            raise UnsupportedError(_why_not(error)) from error
    if on_cuda:
        for by_category in (ran.adding, ran.stepping):
            by_category["temporaries"] += CUDA_WORKSPACES
            by_category["temporaries"] += held_on_device(gradients, copied, target)
    return ran


def _halves(
    window: PlainWindow, micros: Sequence[Any], meter: MemoryMeter, *, is_first: bool
) -> _Ran:
    """The peaks of forwards and backwards, and of the step, of a window that goes on or is first.

    State is made by the first step and lies beside everything from then on. So the forwards and
    backwards of a later window take what those of the first did, and the state; its step takes
    what a second step with the same gradients does.
    """
    state = "optimizer state"
    if window.steps_in_backward and not is_first:
        window.add_all(micros)
        meter.reset_peak()
    window.add_all(micros)
    adding = meter.peak_by_category
    held = meter.current_by_category[state]
    largest = meter.largest
    if not is_first:
        window.step()
        adding[state] += meter.current_by_category[state] - held
    meter.reset_peak()
    window.step()
    stepping = meter.peak_by_category
    meter.note_largest(largest)
    window.clear()
    return _Ran(adding, stepping, meter.largest)


def _continued(before: _Ran, last: _Ran, more: int) -> _Ran:
    """Each further micro-batch in lock-step adds what the last one added; the step is the same."""
    adding = {
        name: size + more * (size - before.adding[name]) for name, size in last.adding.items()
    }
    return _Ran(adding, last.stepping, last.largest)


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
        lock_step: Hold | None = None,
        reduction: Reduction | None = None,
        sent: Callable[[torch.Tensor], None] = lambda flat: None,
        gradients: str = "device",
    ) -> None:
        self._model = model
        self._lock_step: LockStep | None = None
        if lock_step is not None:
            norms = [*batchnorms(model), *tracked_instance_norms(model)]
            self._lock_step = LockStep(norms, model=model, hold=lock_step)
        self._reduction = reduction
        self._sent = sent
        self._loss = loss
        self._optimizer = optimizer
        self._around_update = around_update
        self._casts = precisions.choose(precision, next(model.parameters()).device.type)
        self._sixteen_bit = precisions.SixteenBit([] if optimizer is None else [optimizer])
        self._elsewhere: Elsewhere | None = None
        self.steps_in_backward = gradients == "release"
        if gradients != "device":
            self._elsewhere = Elsewhere(gradients, model, optimizer, around_update)

    def run(self, micros: Sequence[Any]) -> None:
        """Train on these micro-batches once."""
        self.add_all(micros)
        self.step()
        self.clear()

    def add_all(self, micros: Sequence[Any]) -> None:
        """Everything before the optimizer's step."""
        self._sixteen_bit.begin()
        self._casts.begin()
        if self._lock_step is not None and len(micros) > 1:
            self._lock_step.run(micros, forward=self._forward, backward=self._backward)
            with self._reducing(self._reduction is not None, overlap=False):
                pass
        else:
            overlap = self._reduction == "overlap"
            for place, micro in enumerate(micros):
                totals = self._forward(micro)
                is_last = place == len(micros) - 1
                with self._reducing(overlap and is_last, overlap=True), self._leaving(is_last):
                    self._backward(totals)
                del totals
            with self._reducing(self._reduction == "after", overlap=False):
                pass
        self._casts.end()
        self._sixteen_bit.round_once()

    def _forward(self, micro: Any) -> list[torch.Tensor]:
        with self._casts.forward():
            result = as_loss(self._loss(self._model, micro))
        if isinstance(result, Loss):
            return [result.total]
        return [term.total for term in result.by_name.values()]

    def _backward(self, totals: list[torch.Tensor]) -> None:
        torch.autograd.backward(totals)

    def _leaving(self, is_last: bool) -> AbstractContextManager[None]:
        if self._elsewhere is None:
            return nullcontext()
        return self._elsewhere.backward(last=is_last)

    def _reducing(self, reduces: bool, *, overlap: bool) -> AbstractContextManager[None]:
        if not reduces:
            return nullcontext()
        trained = [p for p in self._model.parameters() if p.requires_grad]
        return Buckets(trained, None, lambda work: None, send=self._sent).reducing(overlap=overlap)

    def step(self) -> None:
        """The optimizer's step; gradients stay."""
        if self._optimizer is not None:
            with self._around_update():
                (self._elsewhere or self._optimizer).step()

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
