"""Record what a loop computes around its models, and compute it again with one sample replaced.

The graph of a loss does not show what was detached: a mean over the micro-batch that is subtracted,
a threshold, a teacher's BatchNorm. So the calls of torch in the body of a loop are recorded, and
made again with sample k in the place of sample j. If each sample counts by itself,

    the inputs of the models, and d loss / d outputs, stay the same in every row but j

Calls inside of the models are left out: the outputs of the models are data here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from wholebatch.compile.captured_state import version_of
from wholebatch.coupled.normalisation_layers import known_norms

_log = logging.getLogger("wholebatch")

_MOST_CALLS = 4096
_MOST_ELEMENTS = 1 << 24
_DRAWS = ("rand", "dropout", "bernoulli", "multinomial", "normal", "poisson", "gumbel", "rrelu")


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a tensor in the arguments of a recorded call."""

    number: int


@dataclass(frozen=True, slots=True)
class _Call:
    func: Callable[..., Any]
    given: tuple[Any, Any]
    made: tuple[int, ...]  # the numbers of the tensors in its result
    grad: bool
    autocast: tuple[str, torch.dtype, bool]
    writes: bool

    def inputs(self) -> list[int]:
        return [one.number for one in tree_leaves(self.given) if isinstance(one, _Place)]


@dataclass(frozen=True, slots=True)
class Dependence:
    """What depends on other samples than its own."""

    of: str  # "loss", or "input" of a model
    through: str  # "outputs" of a model, or "data" of the micro-batch
    norm: str | None  # a BatchNorm in training mode that the loop runs


@contextmanager
def not_recording() -> Iterator[None]:
    """Make calls that belong to no loop."""
    was, LoopTrace.paused = LoopTrace.paused, True
    try:
        yield
    finally:
        LoopTrace.paused = was


class LoopTrace(TorchFunctionMode):
    """The calls of torch from `start()` to `stop()`, without those within `enter` and `leave`."""

    paused: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.on = False
        self._below = 0  # modes of others when it was put on
        self._earlier: set[tuple[int, torch.Size]] = set()  # what was read in earlier micro-batches
        self._clear()

    def _clear(self) -> None:
        self._calls: list[_Call] = []
        self._numbers: dict[int, tuple[int, ref[Tensor]]] = {}
        self._shapes: list[torch.Size] = []
        self._held: dict[int, Tensor] = {}  # what no recorded call has made
        self._copied: set[int] = set()  # of those, as they were before a call wrote into them
        self._outputs: list[int] = []
        self._inputs: list[int] = []
        self._batch: set[int] | None = None
        self._norm: str | None = None
        self._foreign = False  # a BatchNorm has run that another window makes exact
        self._recorded = False

    # ------------------------------------------------------------------ recording

    def start(self, batch: Iterable[Tensor] | None = None) -> None:
        """Record from here on; `batch` has the tensors of the micro-batch, if these are known."""
        self.stop()
        self._earlier |= {(one.data_ptr(), one.shape) for one in self._held.values()}
        self._clear()
        self._below = _len_torch_function_stack()
        if batch is not None:
            self._batch = {self._number(one) for one in batch}
        elif self._below:
            return  # It may end while this one is on.
        self.on = self._recorded = True
        self._put_on()

    def stop(self, *, clear: bool = False) -> None:
        """Record no more; `clear` what was recorded."""
        if self.on:
            self._take_off()
        self.on = False
        if clear:
            self._clear()

    def enter(self, given: Sequence[Tensor]) -> None:
        """Leave out what a model does with these tensors, until `leave`."""
        if self.on:
            self._take_off()
            self._inputs += map(self._number, given)

    def leave(self, outputs: Sequence[Tensor]) -> None:
        """Go on: a model has given these tensors back."""
        if self.on:
            self._outputs += map(self._number, outputs)
            self._put_on()

    def _put_on(self) -> None:
        above = [_pop_mode() for _ in range(_len_torch_function_stack() - self._below)]
        for mode in (self, *reversed(above)):
            _push_mode(mode)

    def _take_off(self) -> None:
        above = []
        while _len_torch_function_stack() and (top := _pop_mode()) is not self:
            above.append(top)
        for mode in reversed(above):
            _push_mode(mode)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if len(self._calls) >= _MOST_CALLS:
            self._held.clear()  # The loop may have ended with an error: hold no memory.
        if torch.compiler.is_compiling() or self.paused or len(self._calls) >= _MOST_CALLS:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name.startswith("__i") or name == "__setitem__" or name[-1:] == "_" != name[-2:-1]:
            self._keep_before(given[:1])
        versions = [version_of(one) for one in given]
        places = tree_map_only(Tensor, lambda one: _Place(self._number(one)), (args, kwargs))
        result = func(*args, **kwargs)
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        writes = versions != [version_of(one) for one in given]
        if not made and not writes:
            return result
        if func is F.batch_norm and (*args, *[kwargs.get("training", False)] * 6)[5]:
            self._norm = f"BatchNorm{max(1, given[0].dim() - 2)}d"
            buffers = {id(norm.running_mean) for norm in known_norms}
            self._foreign = self._foreign or any(id(one) in buffers for one in given[1:])
        if any(part in name for part in _DRAWS):  # They would draw other numbers.
            list(map(self._number, made))
            return result
        numbers = tuple(self._number(one, hold=False) for one in made)
        kind = (given or made)[0].device.type
        autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        grad = torch.is_grad_enabled()
        self._calls.append(_Call(func, places, numbers, grad, autocast, writes))
        return result

    def _number(self, tensor: Tensor, *, hold: bool = True) -> int:
        number, held = self._numbers.get(id(tensor), (0, None))
        if held is None or held() is not tensor:
            number = len(self._shapes)
            self._numbers[id(tensor)] = number, ref(tensor)
            self._shapes.append(tensor.shape)
            if hold:
                self._held[number] = tensor
        return number

    def _keep_before(self, written: Sequence[Tensor]) -> None:
        """Keep copies of what a call writes into, and of what shares its memory."""
        for tensor in written:
            self._number(tensor)
            memory = tensor.untyped_storage().data_ptr()
            for number in self._held.keys() - self._copied:
                if self._held[number].untyped_storage().data_ptr() == memory:
                    self._held[number] = self._held[number].detach().clone()
                    self._copied.add(number)

    # ------------------------------------------------------------------ the same again

    def dependence(
        self, loss: Tensor, units: Any, rows: int, *, is_mean: bool
    ) -> Dependence | bool | None:
        """Return what depends on other samples than its own; None if nothing does.

        False: it cannot be told from this micro-batch, which has `rows` samples.
        """
        if not self._recorded:
            return False
        number = next((n for n, held in self._numbers.values() if held() is loss), None)
        try:
            return self._compared(number, units, rows, is_mean=is_mean)
        except Exception as error:  # A call that cannot be made again, or without its graph.
            _log.debug("the loop's calls could not be made again: %r", error)
            return False

    def _compared(
        self, loss: int | None, units: Any, rows: int, *, is_mean: bool
    ) -> Dependence | bool | None:
        number = float(units)
        scale = self._numbers[id(units)][0] if id(units) in self._numbers else None
        outputs = [n for n in dict.fromkeys(self._outputs) if self._has_rows(n, rows)]
        size = sum(self._shapes[n].numel() for n in outputs)
        if rows < 2 or len(self._calls) >= _MOST_CALLS or size > _MOST_ELEMENTS:
            return False
        # Units that are a number would change with the sample if they count some of its parts.
        may_scale = scale is None and number % rows != 0
        again = _Again(self, outputs, loss, scale if is_mean else None)
        before = again.run({}, 0, 0)
        for through, sources in (("outputs", set(outputs)), ("data", self._data(rows))):
            if through == "data" and self._foreign:
                break
            for j in range(0, rows if sources else 0, max(1, rows // 8)):
                now = again.run(sources, j, (j + (rows + 1) // 2) % rows)
                moved = [
                    _moved(was, by, rows, may_scale=may_scale and of == 1)
                    for of, (was, by) in enumerate(zip(before, now, strict=True))
                ]
                if len(moved[0]) > 1 and _is_reordered(before[0], now[0], rows):
                    continue  # Sorted by length, for one: the outputs at hand are in another order.
                # A loop may shuffle its samples: then another row moves, and only that one.
                own = {j} if through == "outputs" else set()
                if rows - len(moved[0] | moved[1] | own) + 1 < min(number, rows):
                    of_input = len(moved[0] | own) > 1
                    return Dependence("input" if of_input else "loss", through, self._norm)
        return None

    def _has_rows(self, number: int, rows: int) -> bool:
        tensor = self._held.get(number)
        return tensor is not None and tensor.shape[:1] == (rows,) and tensor.is_floating_point()

    def _data(self, rows: int) -> set[int]:
        """Return the tensors with a row for each sample that the loop begins with."""
        if self._batch is not None:
            return {n for n in self._batch if self._shapes[n][:1] == (rows,)}
        found = {
            n
            for n, one in self._held.items()
            if one.shape[:1] == (rows,) and not one.requires_grad and n not in self._outputs
            if (one.data_ptr(), one.shape) not in self._earlier
        }
        derived = {*found, *self._outputs}
        for call in self._calls:  # Rows of a data set, or samples that are stacked.
            given = call.inputs()
            made = {n for n in call.made if self._shapes[n][:1] == (rows,)}
            if derived.isdisjoint(given) and made and given:
                if not any(self._shapes[n][:1] == (rows,) for n in given):
                    found |= made
                    derived |= made
            elif not derived.isdisjoint(given):
                derived.update(call.made)
        return found


class _Again:
    """Makes the calls of a trace again."""

    def __init__(
        self, trace: LoopTrace, outputs: Sequence[int], loss: int | None, scale: int | None
    ) -> None:
        self._trace, self._outputs, self._loss, self._scale = trace, outputs, loss, scale

    @torch.enable_grad()
    def run(self, sources: Collection[int], j: int, k: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the inputs of the models and the gradients of their outputs.

        Sample k takes the place of sample j in these sources.
        """
        trace = self._trace

        def replaced(number: int, value: Tensor) -> Tensor:
            if number not in sources:
                return value
            value = value.detach().clone()
            value[j] = value[k]
            return value

        values, leaves = {}, {}
        for number, tensor in trace._held.items():
            values[number] = replaced(number, tensor)
            if number in self._outputs:
                leaves[number] = values[number].detach().requires_grad_()
                values[number] = leaves[number].clone()  # A loop may write into it.
            elif number in trace._copied:
                values[number] = values[number].clone()
        inputs = {n: values[n] for n in trace._inputs if n in values}
        for call in trace._calls:
            if call.writes:
                for number in set(call.inputs()) & trace._held.keys() - trace._copied:
                    if number not in leaves:
                        values[number] = values[number].clone()
            args, kwargs = tree_map_only(_Place, lambda one: values[one.number], call.given)
            kind, dtype, enabled = call.autocast
            with torch.set_grad_enabled(call.grad), torch.autocast(kind, dtype, enabled):
                result = call.func(*args, **kwargs)
            made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
            for number, one in zip(call.made, made, strict=True):
                values[number] = replaced(number, one)
            inputs |= {n: values[n].detach().clone() for n in call.made if n in trace._inputs}
        slopes: Sequence[Tensor | None] = ()
        loss = values.get(self._loss) if self._loss is not None else None
        if loss is not None and loss.requires_grad and leaves:
            loss = loss if self._scale is None else loss * values[self._scale]
            slopes = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        return list(inputs.values()), [slope for slope in slopes if slope is not None]


def _moved(
    before: Sequence[Tensor], now: Sequence[Tensor], rows: int, *, may_scale: bool
) -> set[int]:
    """Return the rows that are others now; `may_scale`, but for a factor that most of them have."""
    found = torch.zeros(rows, dtype=torch.bool)
    for was, value in zip(before, now, strict=True):
        if was.shape[:1] != (rows,) or was.shape != value.shape or not was.numel():
            continue
        a, b = (one.detach().double().flatten(1).cpu() for one in (was, value))
        exact = was.dtype if was.is_floating_point() else torch.float64
        factor = float((b[a != 0] / a[a != 0]).median()) if may_scale and bool(a.any()) else 1.0
        found |= (b - factor * a).abs().amax(1) > torch.finfo(exact).eps ** 0.5 * a.abs().amax()
    return set(found.nonzero().flatten().tolist())


def _is_reordered(before: Sequence[Tensor], now: Sequence[Tensor], rows: int) -> bool:
    """True if the rows are the same in another order, but for the one that was replaced."""
    for was, value in zip(before, now, strict=True):
        if was.shape[:1] == (rows,) and was.shape == value.shape and was.numel():
            every = max(1, was[0].numel() // 256)
            a, b = (one.detach().double().flatten(1)[:, ::every].cpu() for one in (was, value))
            near = torch.cdist(b, a, p=float("inf")).amin(1) <= 1e-9 * float(a.abs().amax())
            if int(near.sum()) < rows - 1:
                return False
    return True
