"""The capture of a micro-step's forward: Dynamo's graph, and the guards under which it is right.

Dynamo, the front end of torch.compile, runs the Python of the model and of the loss function once,
on fake tensors. Its graph is the program that is differentiated (`trace.py`), and its guards tell
when the program is another one (`guards.py`). Dynamo also knows what the code writes. A graph would
write it only once, so it is refused.
"""

from __future__ import annotations

import builtins
import logging
import re
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _disable_current_modes

from wholebatch.compile.dynamo_settings import REASON, can_follow_more, dynamo_settings
from wholebatch.compile.execute_mode import CannotTrace, first_line
from wholebatch.compile.fusion import expression_of
from wholebatch.compile.graph_inputs import Inputs
from wholebatch.compile.model_parts import ModelParts
from wholebatch.compile.opaque_code import is_opaque, require_gradients
from wholebatch.compile.python_writes import written_by_code
from wholebatch.compile.source_names import MICRO_BATCH, name_of, plain_name
from wholebatch.losses.loss import as_loss, terms_of
from wholebatch.window.replaced_attributes import emptied

Place: TypeAlias = tuple[int, int]
"""A dimension of a tensor of a micro-batch: index and dimension."""
OFFSET = -1
"""Stands for a tensor's offset in its storage, in the place of a dimension; less, for a stride."""


def is_offset(place: Place) -> bool:
    """True for how a tensor lies in its storage: its offset, or one of its strides."""
    return place[1] <= OFFSET


_READS_VALUES = ("data-dependent", "data dependent", "Tensor.item()")
"""How Dynamo's messages name a decision by the value of a tensor."""
_TORCH, _HERE = (str(Path(file).parent) for file in (torch.__file__, __file__))
_LIBRARY = Path(logging.__file__).parents[1]
_PYTHON = tuple(f"{_LIBRARY}/{name}{end}" for name in sys.stdlib_module_names for end in "./")
ONE_AT_A_TIME = threading.RLock()
"""A capture replaces parts of Dynamo, and `make_fx` parts of torch, for the whole process."""


class _Captured(Exception):
    """Ends the call of a captured function before anything runs."""


class Input(NamedTuple):
    """Where an input of a program comes from."""

    kind: Literal["tensor", "batch", "size", "number"]
    value: Any
    """A tensor of the model or from outside, the index of a tensor of the micro-batch, the place of
    an open size, or a number."""


@dataclass
class Program:
    """The forward and loss of a micro-batch, as Dynamo's graph.

    The graph returns (totals, units, extras).
    """

    graph: fx.GraphModule
    inputs: list[Input]
    names: tuple[str, ...]
    """The names of the loss's terms."""
    weights: tuple[float, ...]
    extras: tuple[str, ...]
    """The names of the tensors that are handed back beside the loss."""
    mode: Any
    """The fake tensor mode of the capture."""
    batch: dict[int, Tensor]
    """The fake tensors of the micro-batch that the graph reads, by index."""
    outside: Mapping[int, str]
    """The names of the tensors from outside of the micro-batch, by their identity."""
    sizes: dict[Place, Any] = field(default_factory=dict)
    """The symbols of open sizes, each once."""
    every_size: dict[Place, Any] = field(default_factory=dict)
    """The symbols of all sizes that were left open, those that have become numbers too."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors from outside of the micro-batch that the graph reads, each once."""
        found = {id(value): value for kind, value in self.inputs if kind == "tensor"}
        return list(found.values())


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _loss_of_program(
    names: Sequence[str],
    weights: Sequence[float],
    totals: Sequence[Tensor],
    units: Sequence[Any],
    extras: Sequence[str],
    handed_back: Sequence[Tensor],
) -> Tensor:
    """Stand in the graph for the loss that the code returns; its arguments are the outputs."""
    return totals[0].detach()


def _call(function: Any, *args: Any) -> Any:
    """Be the frame that Dynamo captures: its guards begin at these two names."""
    if not is_dynamo_compiling():  # type: ignore[name-defined]  # noqa: F821
        raise RuntimeError("torch.compile is switched off")
    return output(function(*args))  # type: ignore[name-defined]  # noqa: F821


def _output(result: Any) -> Any:
    loss = as_loss(result)
    terms = list(terms_of(loss).items())
    extras = list(getattr(loss, "extras", {}).items())
    return _loss_of_program(
        [name for name, _ in terms],
        [term.weight for _, term in terms],
        [term.total for _, term in terms],
        [term.units for _, term in terms],
        [name for name, _ in extras],
        [extra for _, extra in extras],
    )


class Capture:
    """One run of Dynamo over `loss(model, micro)`."""

    def __init__(
        self,
        loss: Callable[[Any, Any], Any],
        model: nn.Module,
        inputs: Inputs,
        parts: ModelParts,
        *,
        open_places: Sequence[Sequence[Place]] = (),
    ) -> None:
        """Capture it; raise CannotTrace if Dynamo cannot, or if the code writes something.

        `open_places` become symbols.
        """
        self._loss, self._model, self._inputs, self._parts = loss, model, inputs, parts
        self._open = [place for group in open_places for place in group]
        self.outside: list[tuple[str, Tensor]] = []
        """Tensors from outside that the code reads, and their names."""
        self.arrays: list[tuple[str, Any]] = []
        """Arrays of NumPy that the code reads."""

    def run(self, checked: Callable[[Any], bool]) -> tuple[Program, Any]:
        """Return the program and Dynamo's guard manager; `checked` says which guards count.

        `torch.compiler.is_compiling()` is False in the code, as it is when the code runs eagerly,
        unless Dynamo can follow it only where it is True.
        """
        try:
            return self._run(checked, is_compiling=False)
        except CannotTrace:
            try:
                return self._run(checked, is_compiling=True)
            except CannotTrace as reason:
                raise reason from None

    def _run(self, checked: Callable[[Any], bool], *, is_compiling: bool) -> tuple[Program, Any]:
        from torch._dynamo import eval_frame

        self.outside.clear()
        self.arrays.clear()
        code = _call.__code__.replace()  # A new code object has no other guards.
        names = {
            "__builtins__": builtins,
            "is_dynamo_compiling": torch.compiler.is_dynamo_compiling,
            "output": _output,
        }

        def to_check(guards: Any) -> list[bool]:
            return [checked(guard) for guard in guards]

        this = weakref.ref(self)

        def backend(graph: fx.GraphModule, examples: Any) -> Callable[..., Any]:
            capture = this()  # Dynamo keeps every backend: it must not hold the model.
            assert capture is not None
            return capture._keep(graph)

        compiled = torch.compile(
            types.FunctionType(code, names, _call.__name__),
            backend=backend,
            fullgraph=True,
            dynamic=False,
            options={"guard_filter_fn": to_check},
        )
        try:
            with (
                ONE_AT_A_TIME,
                _disable_current_modes(),  # A mode that watches operations would stop it.
                dynamo_settings(is_compiling=is_compiling),
                can_follow_more(),
                self._dimensions_marked(),
                _without_gradients(self._model),
                self._without_hooks(),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")  # Dynamo's, about what it cannot follow.
                compiled(self._loss, self._model, self._inputs.micro)
        except _Captured:
            pass
        except (CannotTrace, torch.OutOfMemoryError):
            raise
        except Exception as problem:  # The user's code and Dynamo may raise anything.
            inner = getattr(problem, "inner_exception", problem.__cause__)
            if isinstance(inner, CannotTrace):
                raise inner from None
            raise CannotTrace(_why_not(problem)) from problem
        finally:
            torch.clear_autocast_cache()  # It may hold fake casts.
        entries = eval_frame._debug_get_cache_entry_list(code)
        if len(entries) != 1 or not hasattr(entries[0], "guard_manager"):
            raise CannotTrace("Dynamo keeps no guards of its code")
        return self._program, entries[0].guard_manager

    @contextmanager
    def _dimensions_marked(self) -> Iterator[None]:
        """Tell Dynamo which dimensions are open. It reads that from attributes of the tensors."""
        marked = [self._inputs.given[index] for index, _ in self._open]
        try:
            for index, dim in self._open:
                torch._dynamo.maybe_mark_dynamic(self._inputs.given[index], dim)
            yield
        finally:
            for tensor in marked:
                vars(tensor).clear()

    def _without_hooks(self) -> AbstractContextManager[None]:
        """Take out hooks that require gradients: Dynamo cannot follow them. They read nothing."""
        return emptied(
            hooks
            for hooks, before in self._parts.filled
            if all(require_gradients(hook) for _, hook in before)
        )

    def _keep(self, graph: fx.GraphModule) -> Callable[..., Any]:
        """Keep the graph; it is not run here."""
        from torch._dynamo.guards import GuardBuilder, install_guard
        from torch._dynamo.symbolic_convert import InstructionTranslator

        effects = InstructionTranslator.current_tx().output.side_effects
        written = written_by_code(effects, self._loss)
        inputs: list[Input] = []
        batch: dict[int, Tensor] = {}
        values: dict[Place, Any] = {}
        for node in graph.graph.find_nodes(op="placeholder"):
            argument, value = node.meta.get("grapharg"), node.meta["example_value"]
            if argument is None:
                raise CannotTrace("Dynamo does not say where an input of its graph comes from")
            source, name = argument.source, name_of(argument.source)
            if not isinstance(value, Tensor):
                place = self._place_of(source, name)
                if is_offset(place) and node.users:
                    raise CannotTrace(f"its code reads {plain_name(name, self._loss)}")
                inputs.append(Input("size", place))
                values[place] = value
            elif name.startswith(MICRO_BATCH):
                index = self._index_of(argument.example, name)
                inputs.append(Input("batch", index))
                batch[index] = value
            else:
                inputs.append(Input("tensor", argument.example))
                plain = plain_name(name, self._loss)
                if type(source).__name__ == "NumpyTensorSource":
                    source = source.base
                    self.arrays.append((plain, argument.example))
                else:
                    self.outside.append((plain, argument.example))
                # A tensor of the same shape in its place would be another input of the graph.
                install_guard(source.make_guard(GuardBuilder.ID_MATCH))
        if written is not None:
            raise CannotTrace(f"it changes {written}, which a graph would do only once")
        for place in self._open:
            if place[0] in batch:
                values.setdefault(place, batch[place[0]].shape[place[1]])
        sizes = _symbols({at: value for at, value in values.items() if not is_offset(at)})
        inputs = [_resolved(each, values, sizes) for each in inputs]
        mode = _mode_of(graph)
        for tensor in batch.values():
            _admit_any_offset(tensor, mode.shape_env)
        outside = {id(tensor): name for name, tensor in self.outside}
        self._program = Program(
            graph, inputs, *_outputs(graph), mode, batch, outside, sizes, values
        )
        _refuse_opaque(graph)

        def run(*_: Any) -> Any:
            raise _Captured

        return run

    def _index_of(self, tensor: Tensor, name: str) -> int:
        """Return the index of a tensor of the micro-batch."""
        for index, given in enumerate(self._inputs.given):
            if tensor is given:
                return index
        raise CannotTrace(
            f"{plain_name(name, self._loss)} is a tensor inside an object, where no graph sees the "
            "next one: give a dict, a tuple or a dataclass"
        )

    def _place_of(self, source: Any, name: str) -> Place:
        """Return the place of an open size."""
        kind = getattr(getattr(source, "prop", None), "name", None)
        if kind not in ("SIZE", "STRIDE", "STORAGE_OFFSET"):
            raise CannotTrace(f"{plain_name(name, self._loss)} is an open number")
        names = {"L": {"function": self._loss, "args": (self._model, self._inputs.micro)}}
        base = name_of(source.base)
        index = self._index_of(eval(base, names), base)  # Dynamo's names are Python.
        if kind == "STRIDE":
            return index, OFFSET - 1 - source.idx
        return index, source.idx if kind == "SIZE" else OFFSET


def _mode_of(graph: fx.GraphModule) -> Any:
    """Return the fake tensor mode in which Dynamo has run the code."""
    values = (node.meta.get("example_value") for node in graph.graph.nodes)
    mode = next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)
    if mode is None:
        raise CannotTrace("its loss reads no tensor")
    # Constants of the graph are tensors with numbers.
    mode.allow_non_fake_inputs = True
    return mode


def _admit_any_offset(tensor: Tensor, environment: Any) -> None:
    """Let guards admit a tensor wherever it lies in its storage: Dynamo takes 0 and 1 apart."""
    offset = expression_of(tensor.storage_offset())
    known = environment.var_to_range.get(offset)
    if known is not None:
        environment.var_to_range[offset] = type(known)(0, known.upper)


def _outputs(
    graph: fx.GraphModule,
) -> tuple[tuple[str, ...], tuple[float, ...], tuple[str, ...]]:
    """Make the parts of the loss the outputs of the graph; return the names and weights."""
    [node] = [n for n in graph.graph.nodes if n.target is _loss_of_program]
    names, weights, totals, units, extras, handed_back = node.args
    output = graph.graph.output_node()
    output.args = ((tuple(totals), tuple(units), tuple(handed_back)),)
    graph.graph.erase_node(node)
    graph.recompile()
    return tuple(names), tuple(weights), tuple(extras)


def _symbols(sizes: dict[Place, Any]) -> dict[Place, Any]:
    """Leave out sizes that have become numbers, and those that are one symbol with another."""
    known: set[Any] = set()
    symbols = {}
    for place, size in sizes.items():
        if isinstance(size, torch.SymInt) and size.node.expr not in known:
            known.add(size.node.expr)
            symbols[place] = size
    return symbols


def _resolved(each: Input, values: dict[Place, Any], sizes: dict[Place, Any]) -> Input:
    """Give a size that is one symbol with another the place of that one, or its number."""
    if each.kind != "size":
        return each
    value = values[each.value]
    for place, symbol in sizes.items():
        if isinstance(value, torch.SymInt) and symbol.node.expr == value.node.expr:
            return Input("size", place)
    # Nothing reads a tensor's place in its storage.
    return Input("number", 0 if is_offset(each.value) else int(value))


def _refuse_opaque(graph: fx.GraphModule) -> None:
    """Raise CannotTrace for functions that Dynamo has not looked into."""
    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.op == "call_function" and is_opaque(node.target):
                name = getattr(node.target, "__name__", node.target)
                raise CannotTrace(f"Dynamo does not look into {name}: what it reads is not known")


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Hide gradients: Dynamo looks at them, and refuses those of another dtype."""
    held = [(trained, trained.grad) for trained in model.parameters() if trained.grad is not None]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient


def _why_not(problem: Exception) -> str:
    """Return why Dynamo cannot capture the code, with the line of the user's code."""
    text = str(problem)
    own = re.search(rf"{REASON}([^'\"\n]*)", text)
    if own is not None:
        return own[1]
    places = re.findall(
        r'File "([^"]+)", line (\d+), in \S+\n\s*(.*)', text.partition("user code:")[2]
    )
    places = [place for place in places if not place[0].startswith((_TORCH, _HERE, *_PYTHON))]
    file, number, code = places[-1] if places else ("", "", "")
    where = f" ({Path(file).name}, line {number}: {code.strip()})" if places else ""
    if any(word.lower() in text.lower() for word in _READS_VALUES):
        return f"its code branches on the value of a tensor{where}"
    return f"Dynamo cannot follow its code: {first_line(problem)}{where}"
