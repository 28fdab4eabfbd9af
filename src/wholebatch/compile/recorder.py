"""The operations of a micro-step, recorded while it runs on its real tensors.

make_fx runs a model on fake tensors, and takes about 1 ms for each operation. Recording a real run
takes a twentieth of that, because operations that are alike have one fake result: those of a
second layer are compared with those of the first, and computed on the device alone.

A real run hides what fake tensors forbid: a decision by a value, or a kernel that no operation of
torch stands for. Whatever may be such a thing ends the recording (`NotRecorded`), and make_fx says
whether the model can be traced:

- an operation that returns no tensor, or a shape that fake tensors cannot predict;
- a tensor that no recorded operation has made, except small literals (`torch.tensor(0.5)`);
- memory that is allocated and then written by no operation;
- a write into a parameter or an input, which would stay;
- an address or the memory of a tensor outside of operations (`tolist`, `numpy`, Triton's launcher);
- a function of a compiled library other than torch and Python's own.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from wholebatch.compile.fake_results import FakeResults, mapped
from wholebatch.compile.fusion import OURS, written_by
from wholebatch.compile.value_reads import NODE, SMALL
from wholebatch.window.forward_state import replaced_attributes

aten = torch.ops.aten
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy"}
"""Compiled libraries that reach a tensor's memory through its operations and methods alone."""
_MEMORY = ("tolist", "numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage")
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class NotRecorded(Exception):
    """Raised where a real run might hide something from the recording."""


def recorded(
    step: Callable[..., Sequence[Tensor]],
    flat: Sequence[Tensor],
    buffers: Iterable[Tensor] = (),
    answer: Callable[..., Any] | None = None,
) -> fx.GraphModule:
    """Run the step on these tensors; return its operations as a graph of its arguments.

    Only `buffers` among the tensors may be written into: the caller puts them back.
    `answer(func, args, kwargs)` may do another thing than a special operation.
    """
    with torch.no_grad(), _disable_current_modes():
        given = [tensor.detach() for tensor in flat]  # Each is one of its own, and not the user's.
    from torch.fx.experimental.proxy_tensor import disable_autocast_cache

    kept = {id(buffer) for buffer in buffers}
    recorder = _Recorder(given, [one for one in flat if id(one) not in kept], answer)
    with (
        disable_autocast_cache(),  # A weight that is used twice is cast, and summed, twice.
        torch.autograd.set_multithreading_enabled(False),  # One thread sees the backward too.
        _memory_hidden(recorder),
        _libraries_watched(recorder),
        recorder,
    ):
        results = step(*given)
    return recorder.graph_of(results)


def without_memory(gradient: Tensor) -> Tensor | None:
    """Return a recorded gradient as a tensor that takes no memory; the graph knows its node."""
    if NODE not in vars(gradient):
        return None
    with _disable_current_modes():
        made = torch.empty((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)
    setattr(made, NODE, getattr(gradient, NODE))
    return made


class _Recorder(TorchDispatchMode):
    """Writes down every operation; the node of a tensor is an attribute of the tensor.

    It is the only mode of a recording: each costs 10 µs for every operation.
    """

    def __init__(
        self, given: Sequence[Tensor], read_only: Sequence[Tensor], answer: Any = None
    ) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        super().__init__()  # type: ignore[no-untyped-call]
        self.inside = False
        """True while an operation runs."""
        self.foreign: str | None = None
        self._answer = answer
        self._read_only = {one.untyped_storage().data_ptr() for one in read_only} - {0}
        self._root = nn.Module()
        self._graph = fx.Graph()
        self._fakes = FakeResults(FakeTensorMode())
        for number, tensor in enumerate(given):
            node = self._graph.placeholder(f"input_{number}")
            self._mark(tensor, node, self._fakes.like(tensor))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Nothing compiles within it, and to say so takes time at every operation.

    def graph_of(self, results: Sequence[Tensor]) -> fx.GraphModule:
        """Return the graph with these results."""
        if self.foreign is not None:
            raise NotRecorded(f"it calls {self.foreign}")
        self._graph.output([self._node(result) for result in results])
        for node in self._graph.nodes:
            name = getattr(node.target, "_opname", "")
            if name in _EMPTY and node.users and node not in written_by(next(iter(node.users))):
                raise NotRecorded("memory is written by no operation")
        return _LazyGraphModule(self._root, self._graph)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        watch = sys.getprofile()
        sys.setprofile(None)
        answer, made = self._answer, NotImplemented
        try:
            if answer is not None and _is_special(func):
                self._answer = None  # The operations of the answer are recorded as they are.
                with self:
                    made = answer(func, args, kwargs)
            return self._run(func, args, kwargs) if made is NotImplemented else made
        finally:
            self._answer, self.inside = answer, False
            sys.setprofile(watch)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not _is_plain(func):
            raise NotRecorded(str(func))
        self.inside = True
        if func is aten.lift_fresh.default:
            self._literal(args[0])
        if optional := _optional_tensors(func):  # Autograd gives None, where Python gives nothing.
            kwargs = {k: one for k, one in kwargs.items() if one is not None or k not in optional}
        nodes = mapped((args, kwargs), self._node)
        if func._schema.is_mutable:
            self._refuse_write(func._schema.arguments, args, kwargs)
        try:
            predicted = self._fakes.of(func, *nodes)
        except Exception as problem:  # It has no fake result, or one that depends on values.
            raise NotRecorded(str(func)) from problem
        results = func(*args, **kwargs)
        self._note(self._graph.call_function(func, *nodes), results, predicted)
        return results

    def _refuse_write(self, arguments: Any, args: Any, kwargs: Any) -> None:
        given = dict(zip((one.name for one in arguments), args, strict=False)) | kwargs
        for one in arguments:
            if one.alias_info is not None and one.alias_info.is_write:
                for part in tree_leaves(given.get(one.name)):
                    if part is not None and part.untyped_storage().data_ptr() in self._read_only:
                        raise NotRecorded("it writes into a parameter or an input")

    def _note(self, node: fx.Node, results: Any, values: Any) -> None:
        if isinstance(results, Tensor):
            self._mark(results, node, values)
        elif isinstance(results, (tuple, list)) and len(results) == len(values):
            node.meta["val"] = values
            for place, (one, value) in enumerate(zip(results, values, strict=True)):
                if isinstance(one, (Tensor, tuple, list)):
                    part = self._graph.call_function(operator.getitem, (node, place))
                    self._note(part, one, value)
                elif one != value:  # The others are sizes.
                    raise NotRecorded(f"{node.target} returns a value")
        elif results is not None or not node.target._schema.is_mutable:  # type: ignore[union-attr]
            raise NotRecorded(f"{node.target} returns a value")

    def _mark(self, tensor: Tensor, node: fx.Node, value: Any) -> None:
        """Give a tensor its node; one that is not as predicted gets none and must not be read."""
        node.meta["val"] = value
        kind = tensor.shape, tensor.dtype, tensor.device
        if type(tensor) is Tensor and kind == (value.shape, value.dtype, value.device):
            setattr(tensor, NODE, (node, self._root))
        elif NODE in vars(tensor):
            delattr(tensor, NODE)

    def _node(self, part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        node, root = vars(part).get(NODE, (None, None))
        if root is not self._root:
            raise NotRecorded("a tensor comes from elsewhere")
        return node

    def _literal(self, tensor: Tensor) -> None:
        """Make a small literal of the code a constant of the graph."""
        if NODE not in vars(tensor) and tensor.numel() <= SMALL and not tensor.requires_grad:
            name = f"_tensor_constant{len(self._root._buffers)}"
            self._root.register_buffer(name, tensor)
            self._mark(tensor, self._graph.get_attr(name), self._fakes.like(tensor))


@cache
def _is_plain(func: Any) -> bool:
    """True if it is an operation of torch or ours, and changes no tensor's shape in place."""
    return func.namespace in OURS and torch.Tag.inplace_view not in func.tags


@cache
def _is_special(func: Any) -> bool:
    """True for grouped products, random draws and reads of values."""
    special = func.__name__ in ("_grouped_mm.default", "_local_scalar_dense.default")
    return special or torch.Tag.nondeterministic_seeded in func.tags


@cache
def _optional_tensors(func: Any) -> set[str]:
    """Return the names of the tensors that need not be given."""
    given = (one for one in func._schema.arguments if one.has_default_value())
    return {one.name for one in given if str(one.type) == "Optional[Tensor]"}


@contextmanager
def _memory_hidden(recorder: _Recorder) -> Iterator[None]:
    """Let only operations reach the memory of tensors within this context and thread."""
    here = get_ident()

    def hidden(name: str) -> Callable[..., Any]:
        by_itself = getattr(Tensor, name)

        def reach(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not recorder.inside and get_ident() == here:
                raise NotRecorded(f"it calls {name}")
            return by_itself(tensor, *args, **kwargs)

        return reach

    with replaced_attributes(Tensor, **{name: hidden(name) for name in _MEMORY}):
        yield


@contextmanager
def _libraries_watched(recorder: _Recorder) -> Iterator[None]:
    """Note if code calls a compiled library that might write into tensors by itself."""
    if sys.getprofile() is not None:
        raise NotRecorded("another profiler is active")

    def watch(_: Any, event: str, function: Any) -> None:
        if event == "c_call":
            name = function.__module__
            if isinstance(name, str) and name.partition(".")[0] not in _LIBRARIES:
                recorder.foreign = name

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)
