"""Windows on fake tensors: copies of the model are made once, what cannot differ is run once.

A prediction needs the peak of the forwards and backwards, and that of the optimizer's step. The
second is the same for every micro-batch size and precision. Of the first only the last micro-batch
of a window counts: it finds the gradients and the cast weights of the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from wholebatch.core.splitting.samples import flatten
from wholebatch.coupled.batchnorm.lock_step import Hold
from wholebatch.errors import UnsupportedError
from wholebatch.memory.attention_masks import masks_as_for
from wholebatch.memory.fake_tensors import (
    FakeMeter,
    fake_batch,
    fake_mode_of,
    fake_model,
    fake_optimizer,
)
from wholebatch.memory.fsdp_sharding import Sharding, gathered, group_now, shard
from wholebatch.memory.kernel_outputs import as_on_cuda
from wholebatch.memory.offload_memory import bucket_bytes_of, held_on_device
from wholebatch.memory.plain_window import PlainWindow, Reduction

__all__ = ["CUDA_WORKSPACES", "Ran", "Rehearsal", "Way"]

CUDA_GRANULE = 512
"""CUDA's caching allocator hands out blocks of multiples of this many bytes."""

CUDA_WORKSPACES = 64 * 2**20
"""What cuBLAS and cuBLASLt keep for themselves on a Hopper GPU: 32 MiB each (less on others)."""

_STATE = "optimizer state"
_LEAVING = ("host", "swap", "moments")
"""Gradients that do not stay on the device from one micro-batch to the next."""


@dataclass(frozen=True)
class Way:
    """How a window runs."""

    precision: str = "full"
    micro_batches: int = 2
    first: bool = False
    lock_step: Hold | None = None
    reduction: Reduction | None = None
    gradients: str = "device"
    noise: bool = False
    sharding: Sharding | None = None


@dataclass(frozen=True)
class Ran:
    """The peaks, by category, of a window's two halves, and its largest single piece."""

    adding: dict[str, int]
    stepping: dict[str, int]
    largest: int


@dataclass
class _Copy:
    """The model without its bytes, for one way of calling its modules."""

    mode: FakeTensorMode
    model: torch.nn.Module
    parameters: dict[int, torch.nn.Parameter]
    has_run: bool = False
    trained: list[torch.nn.Parameter] | None = None
    """Those that a backward gives a gradient; None: not seen yet."""


@dataclass(frozen=True)
class _Stepped:
    """What an optimizer's steps have changed: the state made, and what was alive at the last."""

    made: int
    beyond: dict[str, int] = field(default_factory=dict)
    largest: int = 0


class _GotNone(Exception):
    """A parameter that was thought to be trained got no gradient."""


class _PartOfMore(Exception):
    """A gradient is a view into something larger, which it keeps alive."""


class Rehearsal:
    """Runs windows of a model, its loss and optimizer on fake tensors, as if on `target`.

    The model and its optimizer must stay as they are, but for the classes of its modules.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[[Any, Any], Any],
        *,
        optimizer: torch.optim.Optimizer | None,
        target: torch.device,
    ) -> None:
        self._model = model
        self._loss = loss
        self._optimizer = optimizer
        self._target = target
        self._on_cuda = target.type == "cuda"
        self._is_missing = self._on_cuda and not torch.cuda.is_available()
        self._run_on = torch.device("cpu") if self._is_missing else target
        self._copies: dict[tuple[Any, ...], _Copy] = {}
        self._steps: dict[tuple[Any, ...], _Stepped] = {}
        self._left: dict[tuple[Any, ...], Ran] = {}

    def run(self, batch: Any, way: Way) -> Ran:
        """The peaks of a window whose micro-batches are like `batch`."""
        kinds: tuple[Any, ...] = tuple(
            (type(module), module.training) for module in self._model.modules()
        )
        if way.sharding is not None:
            kinds = (*kinds, way.sharding.ranks, group_now())
        copy = self._copies.get(kinds)
        if copy is None:
            copy = self._copies[kinds] = self._copy(way.sharding)
        try:
            # All of these let go of the same gradients at the same moments.
            key = (kinds, replace(way, gradients=""), bucket_bytes_of(way.gradients), _like(batch))
            leaves = self._gradients(way) in _LEAVING
            ran = self._left.get(key) if leaves else None
            if ran is None:
                ran = self._tried(copy, batch, way)
            if leaves:
                self._left[key] = ran
        except BaseException:
            del self._copies[kinds]  # what it was left in cannot be told
            raise
        if not self._on_cuda:
            return ran
        held = CUDA_WORKSPACES + held_on_device(way.gradients, copy.model, self._target)
        return Ran(_with(ran.adding, held), _with(ran.stepping, held), ran.largest)

    def _tried(self, copy: _Copy, batch: Any, way: Way) -> Ran:
        """By the last micro-batch alone if that is enough, otherwise by all of them."""
        try:
            try:
                return self._run(copy, batch, way)
            except _GotNone:  # now it is known which do
                return self._run(copy, batch, way)
        except _PartOfMore:
            return self._run(copy, batch, way, last_is_enough=False)

    def _copy(self, sharding: Sharding | None) -> _Copy:
        mode = fake_mode_of(self._model)
        model, parameters = fake_model(self._model, mode, self._run_on)
        if sharding is not None:
            parameters = shard(model, mode, parameters, ranks=sharding.ranks, device=self._run_on)
        return _Copy(mode, model, parameters)

    def _run(self, copy: _Copy, batch: Any, way: Way, *, last_is_enough: bool = True) -> Ran:
        stepping = None
        if self._optimizer is not None:
            stepping = fake_optimizer(
                self._optimizer,
                copy.mode,
                self._run_on,
                copy.parameters,
                on_cuda=self._on_cuda,
            )
            if way.sharding is not None:
                stepping.state.clear()  # that of whole parameters; the step makes slices
        if way.lock_step is None:
            micros = [fake_batch(copy.mode, batch, self._run_on)] * way.micro_batches
        else:  # all are there at once
            micros = [fake_batch(copy.mode, batch, self._run_on) for _ in range(way.micro_batches)]
        meter = FakeMeter(
            model=copy.model,
            optimizer=stepping,
            device=self._run_on,
            granule=CUDA_GRANULE if self._on_cuda else 1,
        )
        kernels = as_on_cuda() if self._is_missing else nullcontext()
        with _untouched(self._model), _quiet(), masks_as_for(batch), kernels, copy.mode, meter:
            window = PlainWindow(
                copy.model,
                self._loss,
                optimizer=stepping,
                precision=way.precision,
                around_update=meter.answering,
                lock_step=way.lock_step,
                reduction=way.reduction,
                sent=lambda flat: meter.mark("communication", [flat]),
                gradients=self._gradients(way),
                noise=way.noise and way.lock_step is None,
                sharding=way.sharding,
            )
            # Lock-step reads counts of samples, as an optimizer its steps; a loss may read nothing.
            numbers = meter.answering() if way.lock_step is not None else nullcontext()
            try:
                with numbers:
                    ran = self._halves(copy, window, micros, meter, way, last_is_enough)
            except (
                DataDependentOutputException,
                DynamicOutputShapeException,
                UnsupportedOperatorException,
            ) as error:
                raise UnsupportedError(_why_not(error)) from error
            finally:
                window.clear()
        return ran

    def _gradients(self, way: Way) -> str:
        """Where they go here: the host is the device on a CPU."""
        to_host = way.gradients in ("host", "swap")
        return "device" if to_host and not self._on_cuda else way.gradients

    def _halves(
        self,
        copy: _Copy,
        window: PlainWindow,
        micros: Sequence[Any],
        meter: FakeMeter,
        way: Way,
        last_is_enough: bool,
    ) -> Ran:
        """The peaks of forwards and backwards, and of the step; of the first window or a later one.

        State is made by the first step and lies beside everything from then on. So the forwards
        and backwards of a later window take what those of the first did, and the state; its step
        takes what a second step with the same gradients does.
        """
        is_first = way.first or self._optimizer is None
        needs_state = window.steps_in_backward and not is_first
        alike = way.lock_step is None and way.sharding is None and not _has_sparse(copy.model)
        if alike and last_is_enough and len(micros) == 2:
            trained = copy.trained
            if trained is None:
                trained = [p for p in copy.model.parameters() if p.requires_grad]
            if needs_state:
                window.make_state(trained)
                meter.reset_peak()
            # Sums that leave the device do not wait for the next micro-batch.
            there = [] if self._gradients(way) in ("host", "swap", "moments") else trained
            with _whole_storages(there), _seen(copy, there):
                window.add_last(
                    micros[0],
                    after_forward=not copy.has_run or way.precision not in ("full", "fp32"),
                    with_gradients=there,
                )
        else:
            if way.sharding is not None:
                if not copy.has_run:  # whole parameters are made by the first forward
                    window.add_all(micros[:1])
                    copy.model.zero_grad(set_to_none=True)
                meter.mark("parameters", gathered(copy.model))
                meter.reset_peak()
            if needs_state:
                window.add_all(micros)
                meter.reset_peak()
            window.add_all(micros)
        copy.has_run = True
        adding = meter.peak_by_category
        at_end = meter.current_by_category
        key = (
            way.gradients,
            way.sharding,
            is_first,
            *(p.grad.dtype if p.grad is not None else None for p in copy.model.parameters()),
        )
        largest = meter.largest
        if key not in self._steps:
            if not is_first:
                window.step()
            made = meter.current_by_category[_STATE] - at_end[_STATE]
            meter.reset_peak()
            window.step()
            beyond = {
                name: size - at_end.get(name, 0) for name, size in meter.peak_by_category.items()
            }
            self._steps[key] = _Stepped(made, beyond, meter.largest)
        stepped = self._steps[key]
        adding[_STATE] += stepped.made
        stepping = {name: at_end.get(name, 0) + size for name, size in stepped.beyond.items()}
        return Ran(adding, stepping, max(largest, stepped.largest))


@contextmanager
def _seen(copy: _Copy, there: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Find out, once, which parameters a backward reaches: gradients may be there for no other."""
    if copy.trained is not None or not there:
        yield
        return
    reached: set[int] = set()
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda one: reached.add(id(one)))
        for parameter in there
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    copy.trained = [parameter for parameter in there if id(parameter) in reached]
    if len(copy.trained) < len(there):
        raise _GotNone


@contextmanager
def _whole_storages(there: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Find a gradient that is a view: autograd keeps the first one as it is, with all its storage.

    So it is for a token that is put before the others and expanded over a batch of one, and for
    weights that are concatenated before they are used.
    """
    larger: list[int] = []

    def look(gradient: torch.Tensor) -> None:
        if gradient.untyped_storage().nbytes() > gradient.numel() * gradient.element_size():
            larger.append(1)

    handles = [parameter.register_hook(look) for parameter in there]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if larger:
        raise _PartOfMore


def _with(by_category: dict[str, int], held: int) -> dict[str, int]:
    return {**by_category, "temporaries": by_category["temporaries"] + held}


def _like(batch: Any) -> tuple[Any, ...]:
    """What matters of a batch: the shapes of its tensors."""
    leaves, _ = flatten(batch)
    values = [leaf.value for leaf in leaves]
    return tuple((v.shape, v.stride(), v.dtype) for v in values if isinstance(v, torch.Tensor))


def _has_sparse(model: torch.nn.Module) -> bool:
    """Whether a gradient may be sparse: its size is then that of the micro-batch's own."""
    return any(getattr(module, "sparse", False) is True for module in model.modules())


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
