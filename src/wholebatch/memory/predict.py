"""The peak memory of a training step at a micro-batch size, without running it.

```python
prediction = predict_peak(model, loss, micro, optimizer=optimizer, precision="bf16")
prediction.peak, prediction.by_category["activations"]
```

A window (two micro-batches, the update) runs on fake tensors, which have shapes but no data, under
the same meter that counts a real run. On the CPU the two agree to the byte.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)

from wholebatch.batch.samples import tensors_of
from wholebatch.distributed.fsdp import check_dtypes
from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.memory.activation_checkpointing import blocks_to_checkpoint, checkpointed
from wholebatch.memory.fake_tensors import (
    as_on_cuda,
    fake_batch,
    fake_mode_of,
    fake_model,
    fake_optimizer,
    grouped_mm,
)
from wholebatch.memory.fsdp_sharding import Sharding, of_one_rank
from wholebatch.memory.meter import MemoryMeter
from wholebatch.memory.plain_window import PlainWindow
from wholebatch.window.replaced_attributes import replaced_attributes

CUDA_GRANULE = 512
"""CUDA's caching allocator hands out blocks of multiples of this many bytes."""

CUDA_WORKSPACES = 64 * 2**20
"""The workspaces of cuBLAS and cuBLASLt on a Hopper GPU: 32 MiB each (less on others)."""

_STATE = "optimizer state"
_DEVICE_OF = torch.ops.prim.device.default
_NUMBER_OF = torch.ops.aten._local_scalar_dense.default
_GROUPED = torch.ops.aten._grouped_mm.default


@dataclass(frozen=True)
class Prediction:
    """The predicted peak of a training step in bytes, and its parts by category."""

    adding: dict[str, int]
    """The bytes by category at the peak of the forwards and backwards."""
    update: dict[str, int]
    """Those at the peak of the optimizer's step."""
    largest: int = 0
    """The largest single allocation of the step.

    Free memory is fragmented, so an allocator needs room for one more of these.
    """

    @property
    def by_category(self) -> dict[str, int]:
        """The bytes at the peak, by category."""
        return max(self.adding, self.update, key=lambda part: sum(part.values()))

    @property
    def peak(self) -> int:
        """The peak in bytes."""
        return sum(self.by_category.values())

    def needed(self, device: torch.device) -> int:
        """Return the bytes that a device must have: the peak, and what must stay free beside it.

        CUDA's caching allocator cannot move live memory. Under a hard limit on an H200, GPTs run if
        there is room for one more of their largest allocation, and mostly fail if there is not;
        models of small allocations (a ViT, a ResNet) lose up to 3%.
        """
        return self.peak + (max(self.largest, self.peak // 25) if device.type == "cuda" else 0)

    def sharded(self, model: torch.nn.Module, sharding: Sharding | None) -> Prediction:
        """Return what one rank needs of a model that FSDP2 shards; by arithmetic."""
        if sharding is None:
            return self
        check_dtypes(model)
        adding, update = of_one_rank(self.adding, self.update, model, sharding)
        return Prediction(adding, update, self.largest)


class FakeMeter(MemoryMeter):
    """The meter over fake tensors, which can also run an optimizer's step on them."""

    _answers = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Nothing is compiled on fake tensors, and asking torch takes longer.

    def answering(self) -> AbstractContextManager[None]:
        """Answer 1 if a number is read out of a tensor, as optimizers do with their steps.

        The memory of an update does not depend on it. That of a loss might, so a loss gets the
        fake tensor's error.
        """
        return replaced_attributes(self, _answers=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # Half of all calls: autograd asks for every tensor.
        return self._counted(func, args, kwargs or {})

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func is _NUMBER_OF and self._answers and isinstance(args[0], FakeTensor):
            return 1
        return (grouped_mm if func is _GROUPED else func)(*args, **kwargs)


def predict_peak(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
    precision: str = "full",
    micro_batches: int = 2,
    reduces: bool = False,
    sharding: Sharding | None = None,
) -> Prediction:
    """Predict the peak of a training step with micro-batches like `batch`.

    The step is one in the middle of a run: the optimizer's state exists already, on the device.
    From the second micro-batch on, gradients exist during forward and backward, so two
    micro-batches stand for any larger number (`micro_batches=1` asks for one).

    `precision` is as in `WholeBatch`. `reduces` adds the buckets in which data-parallel ranks sum
    their gradients during the last backward. `sharding` predicts one rank of a model sharded by
    FSDP2.

    The model may be on any device, also `meta`; it is neither run nor changed. `device` is where
    the step would run (default: the model's device). For a CUDA device that this machine lacks, the
    CPU's operations are counted with CUDA's block sizes.
    """
    how: dict[str, Any] = {"optimizer": optimizer, "device": device, "reduces": reduces}
    with simulating(model, loss, **how) as simulation:
        found = simulation.predict(batch, precision=precision, micro_batches=micro_batches)
    return found.sharded(model, sharding)


@contextmanager
def simulating(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
    reduces: bool = False,
) -> Iterator[Simulation]:
    """Copy a model to fake tensors, to predict several steps of it; see `predict_peak`."""
    with _untouched(model), _quiet():
        to = target_device(model, device)
        yield Simulation(model, loss, optimizer, device=to, reduces=reduces)


class Simulation:
    """A model of fake tensors that runs training steps: one for all questions about a model."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[[Any, Any], Any],
        optimizer: torch.optim.Optimizer | None,
        *,
        device: torch.device,
        reduces: bool,
    ) -> None:
        self.device, self._loss, self._reduces = device, loss, reduces
        self._blocks = blocks_to_checkpoint(model)
        on_cuda = device.type == "cuda"
        self._is_missing = on_cuda and not torch.cuda.is_available()
        self._run_on = to = torch.device("cpu") if self._is_missing else device
        self._mode = mode = fake_mode_of(model)
        self._model, parameters = fake_model(model, mode, to)
        self._optimizer = None
        if optimizer is not None:
            self._optimizer = fake_optimizer(optimizer, mode, to, parameters, on_cuda=on_cuda)
        self._has_state = False
        granule = CUDA_GRANULE if on_cuda else 1
        self._meter = FakeMeter(
            model=self._model, optimizer=self._optimizer, device=to, granule=granule
        )

    def predict(
        self,
        batch: Any,
        *,
        precision: str = "full",
        micro_batches: int = 2,
        checkpoints: bool = False,
    ) -> Prediction:
        """Predict the peak of a step; with `checkpoints`, one whose blocks are checkpointed."""
        if micro_batches < 1:
            raise OptionError(f"micro_batches={micro_batches}: must be at least 1")
        micro = fake_batch(self._mode, batch, self._run_on)
        on_cuda = as_on_cuda() if self._is_missing else nullcontext()
        kept = checkpointed(self._model, self._blocks) if checkpoints else nullcontext()
        with on_cuda, kept, self._mode, self._meter:
            window = PlainWindow(
                self._model,
                self._loss,
                optimizer=self._optimizer,
                precision=precision,
                around_update=self._meter.answering,
                reduces=self._reduces,
                sent=lambda flat: self._meter.mark("communication", [flat]),
            )
            try:
                return self._run(window, micro, is_single=micro_batches == 1)
            except (
                DataDependentOutputException,
                DynamicOutputShapeException,
                UnsupportedOperatorException,
            ) as error:
                raise UnsupportedError(
                    f"memory cannot be predicted for this loss: {getattr(error, 'func', error)} "
                    "reads the values of a tensor (.item(), .tolist(), an if on its values, "
                    "indexing by a mask), and a prediction knows shapes only; use torch.where or "
                    "masks of fixed shape, or give the micro-batch size as a number"
                ) from error

    def _run(self, window: PlainWindow, micro: Any, *, is_single: bool) -> Prediction:
        """Run a window, and return what was counted.

        Two micro-batches are enough: the third begins with what the second has found. The first
        update makes the optimizer's state, which exists beside everything from then on. So the
        forwards and backwards of a later window need what those of the first did, plus the state;
        its update needs what a second one with the same gradients does.
        """
        meter = self._meter
        self._model.zero_grad(set_to_none=True)
        window.clear()
        window.begin()
        if not is_single:
            window.add(micro, is_last=False)
        meter.reset_peak()
        window.add(micro, is_last=True)
        window.end()
        adding, before = meter.peak_by_category, meter.current_by_category[_STATE]
        largest = meter.largest
        if not self._has_state:
            window.step()
            self._has_state = True
            adding[_STATE] += meter.current_by_category[_STATE] - before
        meter.reset_peak()
        window.step()
        update = meter.peak_by_category
        if self.device.type == "cuda":
            for part in (adding, update):
                part["temporaries"] += CUDA_WORKSPACES
        return Prediction(adding, update, max(largest, meter.largest))


def state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of state that the optimizer has on the model's device after a step."""
    device = next(model.parameters()).device
    mode = fake_mode_of(model)
    fakes = {
        id(p): torch.nn.Parameter(mode.from_tensor(p.detach()), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    fake = fake_optimizer(optimizer, mode, device, fakes, on_cuda=device.type == "cuda")
    meter = FakeMeter(device=device)
    with _quiet(), mode, meter, meter.answering():
        for parameter in fakes.values():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter, requires_grad=False)
        fake.step()
    state = {id(tensor): tensor for tensor in tensors_of(list(fake.state.values()))}.values()
    return sum(tensor.nbytes for tensor in state if tensor.device.type == device.type)


def target_device(model: torch.nn.Module, device: torch.device | str | None) -> torch.device:
    """Return the device of the step: as given, else the model's; the CPU for a meta model."""
    if device is not None:
        return torch.device(device)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")


@contextmanager
def _untouched(model: torch.nn.Module) -> Iterator[None]:
    """Refuse a loss that uses the real model from outside: it would get fake gradients."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        reached = [parameter for parameter, before in gradients if parameter.grad is not before]
        for parameter, before in gradients:
            parameter.grad = before
    if reached:
        raise UnsupportedError(
            "memory cannot be predicted for this loss: it uses another model object than its "
            "argument; write it as loss(model, micro), and use that model"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore torch's warning about the data pointer of a fake tensor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield
