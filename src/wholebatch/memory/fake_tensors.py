"""A model, an optimizer and a batch without their bytes: what a prediction runs on.

Fake tensors have a shape, a dtype, strides and a device, and operations on them compute only
those. The real model is read (its shapes), never written.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)

from wholebatch.errors import UnsupportedError
from wholebatch.memory.fake_op_cache import NOT_LOOKED_AT, Shapes
from wholebatch.memory.kernel_outputs import asked_of
from wholebatch.memory.meter import MemoryMeter
from wholebatch.memory.resized_batches import map_tensors

__all__ = [
    "FakeMeter",
    "fake_batch",
    "fake_mode_of",
    "fake_model",
    "fake_optimizer",
    "fake_tensor",
]


def fake_mode_of(model: torch.nn.Module) -> FakeTensorMode:
    """The fake mode a model was built under, or a new one for a model that has real tensors."""
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, FakeTensor):
            mode: FakeTensorMode = tensor.fake_mode
            return mode
    # Constants that the loss reaches through a closure (class weights) are real and may be used.
    made = FakeTensorMode(allow_non_fake_inputs=True)
    made.cache_enabled = False  # `Shapes` asks only what is new, and looking for that takes long
    return made


def fake_tensor(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor of the same shape, strides and dtype on `device`."""
    if tensor.device == device:
        if isinstance(tensor, FakeTensor):
            return tensor
        # Keeps ties: tensors that share a storage share one afterwards.
        same: torch.Tensor = mode.from_tensor(tensor.detach(), static_shapes=True)
        return same
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def fake_model(
    model: torch.nn.Module, mode: FakeTensorMode, device: torch.device
) -> tuple[torch.nn.Module, dict[int, torch.nn.Parameter]]:
    """A copy of the model with fake tensors, and its parameters by the id of the original's.

    One tensor that two modules hold is one tensor in the copy too.
    """
    parameters: dict[int, torch.nn.Parameter] = {}
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        fake = torch.nn.Parameter(
            fake_tensor(mode, parameter, device), requires_grad=parameter.requires_grad
        )
        memo[id(parameter)] = parameters[id(parameter)] = fake
    for buffer in model.buffers():
        memo[id(buffer)] = fake_tensor(mode, buffer, device)
    for module in model.modules():
        for value in vars(module).values():  # tensors that are neither parameter nor buffer
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = fake_tensor(mode, value, device)
    try:
        with mode:
            return copy.deepcopy(model, memo), parameters
    except Exception as error:
        raise UnsupportedError(
            f"memory cannot be predicted for {type(model).__name__}, because it cannot be copied"
            f" ({type(error).__name__}: {error}); give the micro-batch size as a number instead"
        ) from error


def fake_batch(mode: FakeTensorMode, batch: Any, device: torch.device) -> Any:
    """A batch of fakes. Each tensor has a storage of its own, as a micro-batch on a device has."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty_like(tensor, device=device)

    return map_tensors(batch, fake)


def fake_optimizer(
    optimizer: torch.optim.Optimizer,
    mode: FakeTensorMode,
    device: torch.device,
    parameters: Mapping[int, torch.nn.Parameter],
    *,
    on_cuda: bool = False,
) -> torch.optim.Optimizer:
    """An optimizer of the same class, options and state, over the fake parameters.

    On CUDA torch chooses its `foreach` implementation by itself, but not for fake tensors.
    """
    groups = []
    for group in optimizer.param_groups:
        fakes = [parameters[id(p)] for p in group["params"] if id(p) in parameters]
        options = {name: value for name, value in group.items() if name != "params"}
        if on_cuda and options.get("foreach", False) is None and not options.get("fused"):
            options["foreach"] = True
        groups.append({**options, "params": fakes})
    # A new object with the old one's attributes needs no guess about the constructor of a class
    # that we do not know. Schedulers leave a `step` bound to the real optimizer on it, and hooks
    # of the user's must not run for a prediction: those stay behind.
    fake = object.__new__(type(optimizer))
    fake.__dict__ = {
        name: type(value)() if name.endswith("_hooks") else value
        for name, value in vars(optimizer).items()
        if name != "step"
    }
    fake.param_groups = groups
    fake.state = defaultdict(dict)
    for key, state in optimizer.state.items():
        if id(key) in parameters:
            fake.state[parameters[id(key)]] = map_tensors(dict(state), _fake_like(mode, device))
    return fake


def _fake_like(
    mode: FakeTensorMode, device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    def fake(tensor: torch.Tensor) -> torch.Tensor:
        # Counts of steps stay on the CPU, beside moments on the device.
        return fake_tensor(mode, tensor, device if tensor.dim() else tensor.device)

    return fake


class FakeMeter(MemoryMeter):
    """The meter over fake tensors, with what they lack to run a whole step."""

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        granule: int,
    ) -> None:
        super().__init__(model=model, optimizer=optimizer, device=device, granule=granule)
        self._answers = False
        self._shapes: Shapes | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled on fake tensors, and asking costs more than the answer

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE_OF:  # asked of fake tensors at every turn; makes nothing
            of = args[0]
            return of.fake_device if isinstance(of, FakeTensor) else func(*args)
        return self._counted(func, args, kwargs or {})

    def _counted(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """As the meter's own, quicker for what is remembered: nearly everything is."""
        in_backward = torch._C._current_graph_task_id() != -1
        self._follow(in_backward=in_backward, recomputing=in_backward and torch.is_grad_enabled())
        if self._shapes is None or func.__name__.startswith(_CHANGE_LISTS):
            return super()._counted(func, args, kwargs)
        result = self._shapes.call(func, args, kwargs, self._asked, self._see_given)
        if result is NOT_LOOKED_AT:
            return super()._counted(func, args, kwargs)
        self._see((result,), "temporaries")
        return result

    def _see_given(self, tensors: Sequence[FakeTensor]) -> None:
        live, kind = self._ledger.live, self._device_type
        for tensor in tensors:  # all of them strided
            if tensor.fake_device.type == kind:
                storage = tensor.untyped_storage()
                # The size of one that is known changes where it is told (`resize_`) or returned.
                if storage._cdata not in live:
                    self._ledger.see(storage, "inputs")

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answer 1 where a number is read out of a tensor, as optimizers do with their steps.

        The memory of an update does not depend on it. That of a loss might, so there the error of
        the fake tensor stands.
        """
        self._answers = True
        try:
            yield
        finally:
            self._answers = False

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What is not remembered."""
        if self._shapes is None:
            mode = next((one.fake_mode for one in args if isinstance(one, FakeTensor)), None)
            if mode is not None:
                self._shapes = Shapes(mode)
            return self._asked(func, args, kwargs)
        changes = func.__name__.startswith(_CHANGE_LISTS) and not func._schema.returns
        if changes and all(_is_unknown(one) for one in args):
            return None  # nothing is made, and nothing that was known is forgotten
        if func is _NUMBER_OF and isinstance(args[0], FakeTensor):
            known = args[0].constant
            if known is not None:
                with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined, no-untyped-call, unused-ignore]
                    return known.item()
            if self._answers:
                return 1
        return self._asked(func, args, kwargs)

    def _asked(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            return asked_of(func, args, kwargs)
        except DataDependentOutputException:
            if not self._answers:
                raise
            return 1


def _is_unknown(value: Any) -> bool:
    """Whether there are no numbers known of tensors, which a change would make wrong."""
    if isinstance(value, list | tuple):
        return all(_is_unknown(one) for one in value)
    if isinstance(value, torch.Tensor):
        local = getattr(value, "_local_tensor", value)  # of a sharded one
        return type(local) is FakeTensor and local.constant is None
    return True


_CHANGE_LISTS = ("_foreach_", "_fused_")
_DEVICE_OF = torch.ops.prim.device.default
_NUMBER_OF = torch.ops.aten._local_scalar_dense.default
