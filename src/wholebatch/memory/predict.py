"""The peak memory of a training step at a micro-batch size, without running it.

```python
prediction = predict_peak(model, loss, micro, optimizer=optimizer, precision="bf16")
prediction.peak, prediction.by_category["activations"]
```

A whole window (forward and backward of the micro-batches, the update) runs on fake tensors, which
have shapes but no data, under the same meter that counts a real run. On the CPU the two agree to
the byte.

A prediction needs the peak of the forwards and backwards, and that of the optimizer's step. The
second is the same for every micro-batch size and precision, so it runs once. Of the first only the
last micro-batch of a window counts: it finds the gradients and the cast weights of the others.

Deep models are predicted from shallow ones: blocks that are alike add the same bytes each. The
bytes alive at one moment of a window (block 2's forward, the backward of the last block but one, …)
grow linearly with the number of blocks. The peak does not: it may move to another moment. So each
moment is extrapolated by itself, and the largest is the peak. Moments of blocks in the middle lie
between those near the two ends, because they are linear in the block's place too.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from wholebatch.batch.samples import flatten
from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.memory.activation_checkpointing import repeated_blocks
from wholebatch.memory.fake_meter import FakeMeter
from wholebatch.memory.fake_tensors import (
    as_on_cuda,
    fake_batch,
    fake_mode_of,
    fake_model,
    fake_optimizer,
    masks_as_for,
)
from wholebatch.memory.fsdp_sharding import Sharding, gathered, group_now, pretended_ranks, shard
from wholebatch.memory.plain_window import PlainWindow, Reduction
from wholebatch.memory.zero_stages import FLATTEN, FlatSlices, on_one_rank

FEW, MORE, CHECK = 4, 5, 6
"""The numbers of blocks to simulate; the third checks, once, that memory is linear in them."""
DEEP = 16
"""The number of alike blocks from which extrapolation is faster than simulating all."""
_ENDS = FEW // 2


@dataclass(frozen=True)
class AlikeBlocks:
    """The blocks at the end of one list of modules that differ in nothing but their numbers."""

    inside: str
    names: tuple[str, ...]

    @contextmanager
    def shortened(self, model: nn.Module, number: int | None) -> Iterator[None]:
        """Leave only the first `number` of the blocks in the model, within this context."""
        modules = model.get_submodule(self.inside)._modules
        before = dict(modules)
        for name in self.names[number:] if number else ():
            del modules[name]
        try:
            yield
        finally:
            modules.update(before)

    @contextmanager
    def landmarks(
        self, model: nn.Module, number: int, reached: Callable[[str], None]
    ) -> Iterator[None]:
        """Call `reached(place)` where the forward or backward of a block near an end begins."""

        def input_hook(place: str, module: nn.Module, args: Any) -> None:
            reached(f"forward {place}")

        def output_hook(place: str, module: nn.Module, args: Any, output: Any) -> None:
            parts = output if isinstance(output, tuple | list) else [output]
            first = next((one for one in parts if isinstance(one, torch.Tensor)), None)
            if first is not None and first.requires_grad:
                first.register_hook(lambda gradient: reached(f"backward {place}"))

        blocks = [model.get_submodule(f"{self.inside}.{n}") for n in self.names[:number]]
        with ExitStack() as hooks:
            for at, block in enumerate(blocks):
                place = str(at if at < _ENDS else at - number)
                if _ENDS <= at < number - _ENDS:
                    place = "between"
                hooks.enter_context(block.register_forward_pre_hook(partial(input_hook, place)))
                hooks.enter_context(block.register_forward_hook(partial(output_hook, place)))
            yield


def find_alike_blocks(model: nn.Module) -> AlikeBlocks | None:
    """Return the longest run of alike blocks at the end of a list, or None if it is short."""

    def kind(name: str) -> tuple[str, Any]:
        return name.rpartition(".")[0], _signature(model.get_submodule(name))

    longest: tuple[str, ...] = ()
    for (inside, _), run in groupby(repeated_blocks(model), key=kind):
        names = tuple(name.rpartition(".")[2] for name in run)
        is_last = names[-1] == next(reversed(model.get_submodule(inside)._modules))
        if inside and is_last and len(names) > len(longest):
            longest, found = names, AlikeBlocks(inside, names)
    return None if len(longest) < DEEP or _share_tensors(model, found) else found


def _share_tensors(model: nn.Module, blocks: AlikeBlocks) -> bool:
    """True if a parameter of a block is used outside of it."""
    inside = [
        id(p)
        for n in blocks.names
        for p in model.get_submodule(f"{blocks.inside}.{n}").parameters()
    ]
    every = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    return len(set(inside)) < len(inside) or sum(one in set(inside) for one in every) > len(inside)


def _signature(block: nn.Module) -> Any:
    """Return all of a block that its memory can depend on, without its number."""
    return [
        (name, type(module), module.training, _shapes(module), _plain_values(module))
        for name, module in block.named_modules()
    ]


def _shapes(module: nn.Module) -> Any:
    tensors = (*module._parameters.items(), *module._buffers.items())
    return [(n, t.shape, t.dtype, t.requires_grad) for n, t in tensors if t is not None]


def _plain_values(module: nn.Module) -> Any:
    """Return numbers and strings of a module; of a rate (dropout) only if it is 0."""
    return {
        name: bool(value) if isinstance(value, float) else value
        for name, value in vars(module).items()
        if isinstance(value, int | float | str | tuple)
        and not any(word in name for word in _NUMBERS_OF_BLOCKS)
    }


_NUMBERS_OF_BLOCKS = ("idx", "index", "layer_id", "layer_number", "depth")


CUDA_GRANULE = 512
"""CUDA's caching allocator hands out blocks of multiples of this many bytes."""

CUDA_WORKSPACES = 64 * 2**20
"""The workspaces of cuBLAS and cuBLASLt on a Hopper GPU: 32 MiB each (less on others)."""

_ROUNDING = 0.002
"""The gap that buckets of a fixed size may make between a line and a simulation."""

_STATE = "optimizer state"


@dataclass(frozen=True)
class Prediction:
    """The predicted peak of a training step in bytes, and its parts by category."""

    peak: int
    by_category: dict[str, int]
    seconds: float
    """The time that the prediction took."""
    largest: int = 0
    """The largest single allocation of the step.

    Free memory is fragmented, so an allocator needs room for one more of these.
    """


@dataclass(frozen=True)
class _WindowOptions:
    """The options of a simulated window; `predict_peak` explains them."""

    precision: str = "full"
    micro_batches: int = 2
    first: bool = False
    reduction: Reduction | None = None
    optimizer_state: str = "device"
    sharding: Sharding | None = None

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise OptionError(f"micro_batches={self.micro_batches}: must be at least 1")
        if self.optimizer_state not in ("device", "host"):
            raise OptionError(
                f'optimizer_state={self.optimizer_state!r}: must be "device" or "host"'
            )
        if self.sharding is not None and self.optimizer_state != "device":
            raise OptionError(
                f"sharding with optimizer_state={self.optimizer_state!r}: a sharded model keeps its"
                " state where its engine does"
            )

    @property
    def shards(self) -> Sharding | None:
        """Return the sharding of parameters; None if every rank holds them all."""
        return self.sharding if self.sharding and self.sharding.shards_parameters else None


@dataclass(frozen=True)
class _Peaks:
    """The peaks of a window's parts, by category, and its largest single allocation."""

    parts: dict[str, dict[str, int]]
    largest: int

    def of_more(self, before: _Peaks, more: int) -> _Peaks:
        """Extrapolate: `more` blocks or micro-batches add as much each as one did to `before`."""
        parts = {
            part: {name: now + more * (now - then[name]) for name, now in self.parts[part].items()}
            for part, then in before.parts.items()
        }
        return replace(self, parts=parts)

    def highest(self) -> dict[str, int]:
        return max(self.parts.values(), key=lambda one: sum(one.values()))


@dataclass
class _Copy:
    """The model without its bytes, for one way of calling its modules."""

    mode: FakeTensorMode
    model: torch.nn.Module
    parameters: dict[int, torch.nn.Parameter]
    has_run: bool = False
    trained: list[torch.nn.Parameter] | None = None
    """The parameters that a backward gives a gradient; None before the first backward."""
    blocks: AlikeBlocks | None = None
    number: int = 0
    """The number of alike blocks that were left in it; 0 for all."""


@dataclass(frozen=True)
class _Stepped:
    """The bytes of state that an optimizer's first step makes, and the peak of its last step."""

    made: int
    beyond: dict[str, int] = field(default_factory=dict)
    largest: int = 0


class _GradientMissing(Exception):
    """A parameter that was assumed to be trained got no gradient."""


class _GradientIsView(Exception):
    """A gradient is a view into something larger, which it keeps alive."""


class Predictor:
    """Predictions for one model, loss and optimizer; later ones are faster than the first.

    The model and the optimizer must not change, except for checkpointing of the model's blocks.
    `device` is where the steps would run (default: the model's device).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[[Any, Any], Any],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.device = _target_device(model, device)
        self._model = model
        self._loss = loss
        self._optimizer = optimizer
        self._on_cuda = self.device.type == "cuda"
        self._is_missing = self._on_cuda and not torch.cuda.is_available()
        self._run_on = torch.device("cpu") if self._is_missing else self.device
        self._copies: dict[tuple[Any, ...], _Copy] = {}
        self._steps: dict[tuple[Any, ...], _Stepped] = {}
        self._known: dict[tuple[Any, ...], _Peaks] = {}
        self._is_linear = self._is_uneven = False

    def peak(self, batch: Any, *, depth: int | None = None, **options: Any) -> Prediction:
        """Predict the peak for micro-batches like `batch`; the options are `predict_peak`'s.

        With `depth`, the model has this many of its `alike_blocks`, instead of all.
        """
        window = _WindowOptions(**options)
        if not self._on_cuda:
            window = replace(window, optimizer_state="device")  # the host is the device
        began = time.perf_counter()
        shards = window.shards
        with nullcontext() if shards is None else pretended_ranks(shards.ranks):
            peaks = self._peaks(batch, window, depth)
        if window.sharding is not None:
            size = next(self._model.parameters()).element_size()
            adjusted = on_one_rank(peaks.parts, window.sharding, self.elements(depth), size)
            peaks = replace(peaks, parts=adjusted)
        by_category = dict(peaks.highest())
        if self._on_cuda:
            by_category["temporaries"] += CUDA_WORKSPACES
        return Prediction(
            sum(by_category.values()), by_category, time.perf_counter() - began, peaks.largest
        )

    def alike_blocks(self) -> AlikeBlocks | None:
        """Return the blocks that predictions are extrapolated over; None if there are few."""
        return None if self._is_uneven else find_alike_blocks(self._model)

    def elements(self, depth: int | None = None) -> int:
        """Return the number of parameters, with this many of the alike blocks."""
        count = sum(parameter.numel() for parameter in self._model.parameters())
        blocks = self.alike_blocks() if depth else None
        if depth is None or blocks is None:
            return count
        one = self._model.get_submodule(f"{blocks.inside}.{blocks.names[-1]}")
        each = sum(parameter.numel() for parameter in one.parameters())
        return count + (depth - len(blocks.names)) * each

    def _peaks(self, batch: Any, window: _WindowOptions, depth: int | None) -> _Peaks:
        """Simulate as many micro-batches and blocks as are needed to know the peaks of all."""
        # The third starts from the same state as the second.
        window = replace(window, micro_batches=min(window.micro_batches, 2))
        return self._extrapolated(batch, window, depth) or self._run(batch, window)

    def _extrapolated(self, batch: Any, window: _WindowOptions, depth: int | None) -> _Peaks | None:
        """Return the peaks of a deep model from those of shallow ones; None if it is not deep."""
        blocks = self.alike_blocks()
        if blocks is None:
            return None

        def of(number: int) -> _Peaks:
            with blocks.shortened(self._model, number):
                return self._run(batch, window, blocks=blocks, number=number)

        try:
            few, more = of(FEW), of(MORE)
            if not self._is_linear:
                guess, found = more.of_more(few, CHECK - MORE).highest(), of(CHECK).highest()
                gap = abs(sum(guess.values()) - sum(found.values()))
                self._is_linear = gap <= _ROUNDING * sum(found.values())
            if self._is_linear:
                return more.of_more(few, (depth or len(blocks.names)) - MORE)
        except Exception:
            pass  # A model may count its blocks, and fail with fewer; all of them run then.
        self._is_uneven = True
        return None

    def _run(
        self,
        batch: Any,
        window: _WindowOptions,
        *,
        blocks: AlikeBlocks | None = None,
        number: int = 0,
    ) -> _Peaks:
        """Return the peaks of a window whose micro-batches are like `batch`."""
        kinds: tuple[Any, ...] = tuple(
            (type(module), module.training) for module in self._model.modules()
        )
        # The place of offloaded state is not simulated.
        sharding = window.sharding and replace(window.sharding, offload=False)
        alike: tuple[Any, ...] = (replace(window, sharding=sharding),)
        values = [leaf.value for leaf in flatten(batch)[0]]
        shapes = [(v.shape, v.stride(), v.dtype) for v in values if isinstance(v, torch.Tensor)]
        key = (kinds, *alike, *shapes)
        if key not in self._known:
            if window.shards is not None:
                kinds = (*kinds, window.shards.ranks, group_now())
            if kinds not in self._copies:
                self._copies[kinds] = self._copy(window.shards, blocks, number)
            try:
                self._known[key] = self._simulated(self._copies[kinds], batch, window)
            except BaseException:
                del self._copies[kinds]  # its state is unknown
                raise
        return self._known[key]

    def _drops_gradients(self, window: _WindowOptions) -> bool:
        """True for ZeRO 2, which keeps slices of gradients; `on_one_rank` adds them."""
        return window.sharding is not None and window.sharding.zero == 2

    def _copy(self, sharding: Sharding | None, blocks: AlikeBlocks | None, number: int) -> _Copy:
        mode = fake_mode_of(self._model)
        model, parameters = fake_model(self._model, mode, self._run_on)
        if sharding is not None:
            parameters = shard(model, mode, parameters, ranks=sharding.ranks, device=self._run_on)
        return _Copy(mode, model, parameters, blocks=blocks, number=number)

    def _simulated(self, copy: _Copy, batch: Any, window: _WindowOptions) -> _Peaks:
        """Run the last micro-batch alone if that is enough, otherwise all of them."""
        for _ in range(2):
            try:
                return self._simulate(copy, batch, window, last_is_enough=True)
            except _GradientMissing:
                pass  # The trained parameters are known now.
            except _GradientIsView:
                break
        return self._simulate(copy, batch, window, last_is_enough=False)

    def _simulate(
        self, copy: _Copy, batch: Any, options: _WindowOptions, *, last_is_enough: bool
    ) -> _Peaks:
        optimizer = self._fake_optimizer(copy, options)
        slices = None
        if optimizer is not None and options.sharding is not None and options.sharding.zero:
            with copy.mode:
                slices = FlatSlices(optimizer, options.sharding)
        micros = [fake_batch(copy.mode, batch, self._run_on)] * options.micro_batches
        meter = FakeMeter(
            model=copy.model,
            optimizer=optimizer,
            device=self._run_on,
            granule=CUDA_GRANULE if self._on_cuda else 1,
        )
        kernels = as_on_cuda() if self._is_missing else nullcontext()
        landmarks: AbstractContextManager[None] = nullcontext()
        if copy.blocks is not None:
            landmarks = copy.blocks.landmarks(copy.model, copy.number, meter.reach)
        around = (_untouched(self._model), _quiet(), masks_as_for(batch), kernels, landmarks)
        with ExitStack() as entered:
            for one in (*around, copy.mode, meter):
                entered.enter_context(one)
            if slices is not None:
                meter.mark("parameters", slices.slices)
            window = PlainWindow(
                copy.model,
                self._loss,
                optimizer=optimizer,
                precision=options.precision,
                around_update=meter.answering,
                reduction=options.reduction,
                sent=lambda flat: meter.mark("communication", [flat]),
                optimizer_state=options.optimizer_state,
                drops_gradients=self._drops_gradients(options),
                sharding=options.sharding,
                slices=slices,
            )
            try:
                self._add(copy, window, micros, meter, options, last_is_enough)
                return self._step(copy, window, meter, options)
            except (
                DataDependentOutputException,
                DynamicOutputShapeException,
                UnsupportedOperatorException,
            ) as error:
                raise UnsupportedError(
                    f"memory cannot be predicted for this loss: {getattr(error, 'func', error)} "
                    "reads numbers out of a tensor (.item(), .tolist(), an if on its values, "
                    "indexing by a mask), and a prediction has shapes but no numbers; use "
                    "torch.where or masks of fixed shape, or give the micro-batch size as a number"
                ) from error
            finally:
                window.clear()

    def _fake_optimizer(self, copy: _Copy, options: _WindowOptions) -> torch.optim.Optimizer | None:
        if self._optimizer is None:
            return None
        fake = fake_optimizer(
            self._optimizer, copy.mode, self._run_on, copy.parameters, on_cuda=self._on_cuda
        )
        if options.sharding is not None or options.optimizer_state == "host":
            fake.state.clear()  # It is that of whole parameters, or not on the device.
        return fake

    def _is_first(self, options: _WindowOptions) -> bool:
        return options.first or self._optimizer is None

    def _add(
        self,
        copy: _Copy,
        window: PlainWindow,
        micros: Sequence[Any],
        meter: FakeMeter,
        options: _WindowOptions,
        last_is_enough: bool,
    ) -> None:
        """Run the forwards and backwards."""
        alike = options.shards is None
        # The size of a sparse gradient depends on the micro-batch.
        has_sparse = any(getattr(one, "sparse", False) is True for one in copy.model.modules())
        if alike and last_is_enough and len(micros) == 2 and not has_sparse:
            trained = copy.trained
            if trained is None:
                trained = [p for p in copy.model.parameters() if p.requires_grad]
            there = [] if self._drops_gradients(options) else trained
            with _gradients_checked(copy, there):
                window.add_last(
                    micros[0],
                    after_forward=not copy.has_run or options.precision not in ("full", "fp32"),
                    with_gradients=there,
                )
        else:
            if options.shards is not None:
                if not copy.has_run:  # The first forward creates the whole parameters.
                    window.add_all(micros[:1])
                    copy.model.zero_grad(set_to_none=True)
                meter.mark("parameters", gathered(copy.model))
                meter.reset_peak()
            window.add_all(micros)
        copy.has_run = True

    def _step(
        self, copy: _Copy, window: PlainWindow, meter: FakeMeter, options: _WindowOptions
    ) -> _Peaks:
        """Run the update, and return the peaks of both halves, of a first window or a later one.

        The first step makes the optimizer's state, which exists beside everything from then on. So
        the forwards and backwards of a later window need what those of the first did, plus the
        state; its step needs what a second step with the same gradients does.
        """
        adding, at_end = meter.peaks_by_part(), meter.current_by_category
        largest = meter.largest
        is_first = self._is_first(options)
        dtypes = [None if p.grad is None else p.grad.dtype for p in copy.model.parameters()]
        key = (options.optimizer_state, options.sharding, is_first, copy.number, *dtypes)
        if key not in self._steps:
            if not is_first:
                window.step()
            made = meter.current_by_category[_STATE] - at_end[_STATE]
            meter.reset_peak()
            window.step()
            peak = meter.peak_by_category
            beyond = {name: size - at_end.get(name, 0) for name, size in peak.items()}
            self._steps[key] = _Stepped(made, beyond, meter.largest)
        stepped = self._steps[key]
        for part in adding.values():
            part[_STATE] += stepped.made
        stepping = {name: at_end.get(name, 0) + size for name, size in stepped.beyond.items()}
        if window.slices is not None:
            adding[FLATTEN] = {**at_end, _STATE: at_end[_STATE] + stepped.made}
        return _Peaks({**adding, "step": stepping}, max(largest, stepped.largest))


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
    reduction: Reduction | None = None,
    optimizer_state: str = "device",
    sharding: Sharding | None = None,
) -> Prediction:
    """Predict the peak of a training step with micro-batches like `batch`.

    The step is one in the middle of a run: the optimizer's state exists already (`first=True` asks
    for the first step, which creates it). From the second micro-batch on, gradients exist during
    forward and backward, so two micro-batches stand for any larger number.

    `reduction` adds the buckets in which data-parallel ranks sum their
    gradients: "overlap" in the last backward, or "after" it. `optimizer_state` is as in
    `wb.Memory` ("host" saves nothing if the device is the CPU). `sharding` predicts one rank of a
    model sharded by FSDP2.

    The model may be on any device, also `meta`; it is neither run nor changed. `device` is where
    the step would run (default: the model's device). For a CUDA device that this machine lacks,
    the CPU's operations are counted with CUDA's block sizes.
    """
    return Predictor(model, loss, optimizer=optimizer, device=device).peak(
        batch,
        precision=precision,
        micro_batches=micro_batches,
        first=first,
        reduction=reduction,
        optimizer_state=optimizer_state,
        sharding=sharding,
    )


def _target_device(model: torch.nn.Module, device: torch.device | str | None) -> torch.device:
    """Return the device of the step: as given, else the model's; the CPU for a meta model."""
    if device is not None:
        return torch.device(device)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")


@contextmanager
def _gradients_checked(copy: _Copy, there: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Check, after a backward, that it can stand for those before it.

    Every parameter whose gradient was there must get one; the first backward finds those that do.
    No gradient may be a view: autograd keeps the first one as it is, with all its storage. That
    happens for a token that is expanded over a batch of one, and for weights that are concatenated
    before they are used.
    """
    reached: set[int] = set()
    views: list[torch.Size] = []

    def look(gradient: torch.Tensor) -> None:
        if gradient.untyped_storage().nbytes() > gradient.numel() * gradient.element_size():
            views.append(gradient.shape)

    def note(parameter: torch.Tensor) -> None:
        reached.add(id(parameter))

    with ExitStack() as hooks:
        for parameter in there:
            hooks.enter_context(parameter.register_hook(look))
            if copy.trained is None:
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(note))
        yield
    if copy.trained is None and there:
        copy.trained = [parameter for parameter in there if id(parameter) in reached]
        if len(copy.trained) < len(there):
            raise _GradientMissing
    if views:
        raise _GradientIsView


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
            "memory cannot be predicted for this loss: it uses a model from outside instead of the"
            " one it is given; write it as a function of its first argument, loss(model, micro)"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore torch's warning about the data pointer of a fake tensor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield
