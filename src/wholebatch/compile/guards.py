"""Dynamo's guards: they tell when something that the code of a micro-step reads has changed.

A trace runs the Python of the model and of the loss function once, and every value that it reads
becomes a constant of the graph. So Dynamo, the front end of torch.compile, runs that code first, on
fake tensors. It writes down a guard for everything that the code reads: globals, attributes behind
methods and properties, classes, other modules, items of containers. A graph runs only while its
guards hold; they are checked at every micro-step.

Dynamo also knows what the code writes. A graph would write it only once, so it is refused.
"""

from __future__ import annotations

import builtins
import enum
import inspect
import logging
import os
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from wholebatch.batch.samples import flatten
from wholebatch.compile.execute_mode import CannotTrace, first_line
from wholebatch.compile.graph_inputs import NUMBER, Integer
from wholebatch.compile.model_parts import ModelParts
from wholebatch.compile.patched_calls import REPLACEMENTS, calls_for_guards
from wholebatch.compile.refused_code import only_requires_grad
from wholebatch.window.autograd_graph import version_of
from wholebatch.window.replaced_attributes import emptied, replaced_attributes

_READS_VALUES = ("data-dependent", "data dependent", "Tensor.item()")
"""How Dynamo's messages name a decision by the value of a tensor."""
_MICRO_BATCH = "L['args'][1]"
_ARGUMENTS = {"L['args'][0]": "the model", _MICRO_BATCH: "the micro-batch"}


_TORCH, _HERE = (str(Path(file).parent) for file in (torch.__file__, __file__))
_LIBRARY = Path(logging.__file__).parents[1]
_PYTHON = tuple(f"{_LIBRARY}/{name}{end}" for name in sys.stdlib_module_names for end in "./")


_ARRAY = 2**14
"""The most numbers of a NumPy array that are compared at every micro-step."""


class _Captured(Exception):
    """Ends the call of a captured function before anything runs."""


class Guards:
    """The guards of one capture of `loss(model, micro)`."""

    def __init__(
        self, loss: Callable[[Any, Any], Any], model: nn.Module, micro: Any, marked: Any = None
    ) -> None:
        """Capture it; raise CannotTrace if Dynamo cannot, or if the code writes something.

        `marked` is the micro-batch with `NUMBER` for each number that is not guarded, and with an
        `Integer` for each other one.
        """
        self._loss = loss
        names = {"function": loss, "args": (model, marked)}
        self._marked = {"L": names, **names}
        self.numbers: dict[str, int] = {}
        """The whole numbers in the batch that the code reads and that are guarded."""
        self._parts = ModelParts(model)
        self._of_batch = [leaf.value for leaf in flatten(micro)[0]]
        self._inputs: list[tuple[str, Tensor]] = []
        self._arrays: list[tuple[str, Any, Any]] = []
        self._manager = self._captured(model, micro)
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._outside = [
            (name, watched) for name, watched in self._inputs if id(watched) not in own
        ]
        self._inputs.clear()
        self._watched: list[tuple[str, Tensor, int]] = []

    def hold(self, model: nn.Module, micro: Any) -> bool:
        """True if the code reads for this micro-batch what it read for the captured one."""
        if self._written_into() is not None or not self._parts.hold():
            return False
        with _disable_current_modes():  # as it was captured
            return bool(self._manager.check(self._locals(model, micro)))

    def broken_by(self, model: nn.Module, micro: Any) -> str:
        """Return the name of the value that has changed, and the line that reads it."""
        name = self._written_into()
        if name is not None:
            return name
        if not self._parts.hold():
            return "a hook, or a part, of the model"
        with _disable_current_modes():
            info = self._manager.check_verbose(self._locals(model, micro))
        parts = [str(part) for part in info.verbose_code_parts]
        return _value_and_line(parts[0] if parts else "", self._loss)

    def _written_into(self) -> str | None:
        """Return the name of a tensor or array that is watched and has other values, or None."""
        for name, tensor, version in self._watched:
            if version_of(tensor) != version:
                return name
        for name, array, values in self._arrays:
            if array.tobytes() != values:
                return name
        return None

    def watch(self, tensors: Iterable[Tensor], *, every: bool) -> None:
        """Count a write into one of these tensors, whose values a graph contains, as a change.

        `every`: and into every other tensor that the code reads, but the model's.
        """
        names = {id(tensor): name for name, tensor in self._outside}
        tensors = [*tensors, *(tensor for _, tensor in self._outside if every)]
        self._watched += [
            (names.get(id(watched), "a tensor"), watched, version_of(watched))
            for watched in tensors
        ]

    def accept_tensors(self) -> None:
        """Take tensors as unchanged: all were put back, which counts as a write into each."""
        self._watched = [(name, watched, version_of(watched)) for name, watched, _ in self._watched]

    def _locals(self, model: nn.Module, micro: Any) -> dict[str, Any]:
        return {"function": self._loss, "args": (model, micro)}

    def _captured(self, model: nn.Module, micro: Any) -> Any:
        """Return Dynamo's guard manager. The code object is new, and so has no other guards."""
        from torch._dynamo import eval_frame

        code = _call.__code__.replace()
        names = {"__builtins__": builtins, "is_compiling": torch.compiler.is_compiling}
        call = types.FunctionType(code, names, _call.__name__)
        compiled = torch.compile(
            call,
            backend=self._backend,
            fullgraph=True,
            dynamic=False,
            options={"guard_filter_fn": self._to_check},
        )
        try:
            with (
                _disable_current_modes(),  # A mode that watches operations would stop it.
                _dynamo_settings(),
                calls_for_guards(),
                _without_gradients(model),
                _without_hooks(self._parts),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")  # Dynamo's, about what it cannot follow.
                compiled(self._loss, model, micro)
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
        return entries[0].guard_manager

    def _backend(self, graph: Any, examples: Any) -> Callable[..., Any]:
        """Take what the capture found; the graph itself is not used."""
        from torch._dynamo.guards import GuardBuilder, install_guard
        from torch._dynamo.symbolic_convert import InstructionTranslator

        written = _written(InstructionTranslator.current_tx().output.side_effects, self._loss)
        for node in graph.graph.find_nodes(op="placeholder"):
            argument = node.meta.get("grapharg")
            if argument is None or not isinstance(argument.example, Tensor):
                continue
            source, fake = argument.source, node.meta["example_value"]
            name = _name_of(source)
            if name.startswith(_MICRO_BATCH):
                if not any(argument.example is value for value in self._of_batch):
                    raise CannotTrace(
                        f"{_plain_name(name, self._loss)} is a tensor inside an object, where no "
                        "graph sees the next one: give a dict, a tuple or a dataclass"
                    )
                continue
            if type(source).__name__ == "NumpyTensorSource":
                self._watch_array(source.base, argument.example)
                continue
            is_models = type(argument.example) is nn.Parameter or "._buffers[" in name
            if not is_models and fake._version:
                written = written or _plain_name(name, self._loss)
            # A tensor of the same shape in its place would be another constant of the graph.
            install_guard(source.make_guard(GuardBuilder.ID_MATCH))
            self._inputs.append((_plain_name(name, self._loss), argument.example))
        if written is not None:
            raise CannotTrace(f"it changes {written}, which a graph would do only once")

        def run(*_: Any) -> Any:
            raise _Captured

        return run

    def _to_check(self, guards: Any) -> list[bool]:
        """Leave out guards on the micro-batch's tensors, on hooks, and on what is replaced.

        A graph is for one shape, dtype and device of each tensor, and for one of each number, or
        knows by itself for which others. Arrays of NumPy are compared by `_written_into`, hooks of
        the model by `ModelParts`.
        """
        checked = []
        for guard in guards:
            if guard.guard_type == "TENSOR_MATCH":
                of_batch = (_MICRO_BATCH, "args[1]", "___from_numpy(")
                checked.append(not str(guard.name).startswith(of_batch))
            elif type(guard.value) is int:
                checked.append(not self._is_size(guard))
            elif guard.guard_type == "EMPTY_NN_MODULE_HOOKS_DICT":
                checked.append(not self._parts.include(guard.value))
            else:
                checked.append(not any(guard.value is replacement for replacement in REPLACEMENTS))
        return checked

    def _is_size(self, guard: Any) -> bool:
        """True if this guard is one on a number that the micro-batch's kind contains."""
        try:
            place = eval(str(guard.name), dict(self._marked))  # Dynamo's names are Python.
        except Exception:
            return False
        if isinstance(place, Integer):
            self.numbers[place.name] = guard.value
        return place is NUMBER

    def _watch_array(self, source: Any, shared: Tensor) -> None:
        """Count a write into a NumPy array as a change: nothing else tells of one."""
        from torch._dynamo.guards import GuardBuilder, install_guard

        name = _plain_name(_name_of(source), self._loss)
        if shared.numel() > _ARRAY:
            raise CannotTrace(f"it reads the large NumPy array {name}: make it a tensor")
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))
        array = shared.numpy()
        self._arrays.append((name, array, array.tobytes()))


def _without_hooks(parts: ModelParts) -> AbstractContextManager[None]:
    """Take out hooks that require gradients: Dynamo cannot follow them. They read nothing."""
    return emptied(
        hooks
        for hooks, before in parts.filled
        if all(only_requires_grad(hook) for _, hook in before)
    )


def _call(function: Any, *args: Any) -> Any:
    """Be the frame that Dynamo captures: its guards begin at these two names."""
    if not is_compiling():  # type: ignore[name-defined]  # noqa: F821
        raise RuntimeError("torch.compile is switched off")
    return function(*args)


class Unlisted(set[Any]):
    """A set of functions that is empty when it is listed.

    torch 2.11 sorts its settings for a log of its own. Functions have no order, so it would print a
    traceback at each capture.
    """

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@contextmanager
def _dynamo_settings() -> Iterator[None]:
    """Let Dynamo take numbers as constants, guard hooks too, and pass over what only tells."""
    from torch._dynamo import config, symbolic_convert
    from torch._dynamo.variables import ConstDictVariable, UserDefinedClassVariable

    tells: set[Any] = {print, warnings.warn}
    tells |= {
        value for name, value in vars(logging.Logger).items() if name.startswith(_TELLING)
    } | {logging.Logger.isEnabledFor, logging.Logger.log}
    wanted: dict[str, Any] = {
        "specialize_int": True,
        "specialize_float": True,
        "trace_autograd_ops": True,
        "skip_nnmodule_hook_guards": False,
        # Until torch 2.12 these left out guards on literals, and on what lies in unchanged dicts: a
        # list among the defaults of a function, `requires_grad` of a teacher.
        "skip_guards_on_constant_func_defaults": False,
        "use_recursive_dict_tags_for_guards": False,
        "skip_tensor_guards_with_matching_dict_tags": False,
        # A thread may compile an older graph meanwhile, and the note of it is not the thread's own.
        "error_on_nested_fx_trace": False,
        # Its name since torch 2.12; before, only methods of loggers were among them.
        "ignore_logging_functions": Unlisted(tells),
        "reorderable_logging_functions": Unlisted({print, warnings.warn}),
    }
    if not hasattr(config, "ignore_logging_functions"):
        wanted["ignore_logger_methods"] = Unlisted(tells)
    known = {name: value for name, value in wanted.items() if hasattr(config, name)}
    look_up = getattr(ConstDictVariable, _LOOKUP, None)
    lookups = {} if look_up is None else {_LOOKUP: _missing_keys_guarded(look_up)}
    is_stdlib = getattr(symbolic_convert, "is_stdlib", None)
    asked = (
        {}
        if is_stdlib is None
        else {"is_stdlib": lambda module: module is not os and is_stdlib(module)}
    )
    reads = {}
    if not hasattr(UserDefinedClassVariable, "resolve_cls_plain_attr"):  # before torch 2.13
        reads["var_getattr"] = _class_attributes_guarded(UserDefinedClassVariable.var_getattr)
    with (
        config.patch(known),
        replaced_attributes(ConstDictVariable, **lookups),
        replaced_attributes(UserDefinedClassVariable, **reads),
        replaced_attributes(symbolic_convert, **asked),  # os.getenv reads the environment.
    ):
        yield


_LOOKUP = "getitem_const_raise_exception_if_absent"


def _missing_keys_guarded(look_up: Callable[..., Any]) -> Callable[..., Any]:
    """Guard a key that a dictionary does not have: Dynamo does so for `in` and `get`, not for [].

    The lookups of os.environ are such, with or without a default.
    """

    def guarded(variable: Any, tx: Any, key: Any) -> Any:
        if variable.source is not None and key not in variable:
            variable.install_dict_contains_guard(tx, [key])
        return look_up(variable, tx, key)

    return guarded


def _class_attributes_guarded(read: Callable[..., Any]) -> Callable[..., Any]:
    """Guard a number or a text that is an attribute of a class: torch 2.11 takes it as constant."""
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import ConstantVariable, VariableTracker

    def guarded(variable: Any, tx: Any, name: str) -> Any:
        value = inspect.getattr_static(variable.value, name, None)
        is_plain = ConstantVariable.is_literal(value) or isinstance(value, enum.Enum)
        if variable.source is None or not is_plain or name.startswith("__"):
            return read(variable, tx, name)
        return VariableTracker.build(tx, value, AttrSource(variable.source, name))

    return guarded


_TELLING = ("debug", "info", "warn", "error", "critical", "exception")
"""The names of a logger's methods begin like this, those that libraries have added too."""


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


def _written(effects: Any, loss: Any) -> str | None:
    """Return the name of something that the code changes, and does not change back."""
    for variable in effects._get_modified_vars():
        kind = type(variable.mutation_type).__name__
        if not kind.endswith("Existing"):
            continue  # The code has made it itself.
        source = getattr(variable, "source", None)
        path = "" if source is None else _name_of(source)
        if path.startswith(_MICRO_BATCH) and _only_removes(variable):
            continue  # `micro.pop("labels")`: the next one has its own.
        name = _plain_name(path, loss) if path else "a variable"
        changed = effects.store_attr_mutations.get(variable, {})
        if not changed:
            return name  # A container, whose values may be any.
        owner = getattr(variable, "value", None)
        fields = [field for field, to in changed.items() if not _is_as_before(owner, field, to)]
        if fields:
            return f"{name}.{fields[0]}" if hasattr(owner, "__dict__") else name
    return None


def _only_removes(variable: Any) -> bool:
    """True if nothing is left in this dictionary but what was in it."""
    items, before = (getattr(variable, name, None) for name in ("items", "original_items"))
    if not isinstance(items, dict) or not isinstance(before, dict):
        return False
    kept = [(before.get(getattr(key, "vt", key)), value) for key, value in items.items()]
    return all(was is not None and was.unwrap() is value.unwrap() for was, value in kept)


_MISSING = object()


def _is_as_before(owner: Any, field: str, value: Any) -> bool:
    """True if this attribute ends as it began."""
    before = getattr(owner, field, _MISSING)
    if type(value).__name__ == "DeletedVariable":
        return field not in getattr(owner, "__dict__", ())  # It was put there, and taken away.
    if value.is_python_constant():
        now = value.as_python_constant()
        return bool(type(now) is type(before) and now == before)
    return isinstance(before, Tensor) and _is_same_tensor(value, before)


def _is_same_tensor(value: Any, before: Tensor) -> bool:
    """True for `x` and for `x.to(...)` where that changes nothing."""
    node = value.as_proxy().node if hasattr(value, "proxy") else None
    fake = None if node is None else node.meta.get("example_value")
    while node is not None and node.op == "call_method" and node.target in ("to", "contiguous"):
        node = node.args[0]
        if node.meta.get("example_value") is not fake:
            return False
    argument = None if node is None else node.meta.get("grapharg")
    if argument is None or _name_of(argument.source).startswith(_MICRO_BATCH):
        return False  # The next one is another.
    return argument.example is before


def _name_of(source: Any) -> str:
    name = source.name
    return str(name() if callable(name) else name)  # a property in newer versions of torch


_PATH = re.compile(r"[LG]\['[^']*'\](?:\.\w+|\[[^\]]*\])*")


def _plain_name(path: str, loss: Any) -> str:
    """Return Dynamo's name of a value as the user would write it."""
    path = _with_free_name(path, loss)
    for prefix, name in _ARGUMENTS.items():
        if path.startswith(prefix):
            path = name + path.removeprefix(prefix)
    path = re.sub(r"G\['__import_(\w+)'\]", lambda m: m[1].replace("_dot_", "."), path)
    path = re.sub(r"[LG]\['(\w+)'\]", r"\1", path)
    path = re.sub(r"\._modules\['(\w+)'\]", r".\1", path)
    path = re.sub(r"\._(?:parameters|buffers)\['(\w+)'\]", r".\1", path)
    path = re.sub(r"^(function\b.*|\w+)\.__self__", "self", path)  # of the user's own method
    path = path.replace("the micro-batch['micro']", "the micro-batch")
    return path.removeprefix("__main__.")


def _value_and_line(part: str, loss: Any) -> str:
    """Return the value and the line of a guard's text: `G['beta'] == 1.0  # ...  # file:3 in f`."""
    path = _PATH.search(part)
    value = _plain_name(path[0], loss) if path else part.split("#")[0].strip()
    line = re.search(r"# (?:\S*/)?(\S+\.py:\d+) in ", part)
    return f"{value} ({line[1]})" if line else value


_CELL = re.compile(r"\.__closure__\[(\d+)\]\.cell_contents")


def _with_free_name(path: str, loss: Any) -> str:
    """Put the name of a free variable for `function.__closure__[0].cell_contents`."""
    *_, cell = [None, *_CELL.finditer(path)]
    if cell is None:
        return path
    try:  # Dynamo's names are expressions of Python.
        function = eval(path[: cell.start()], {"L": {"function": loss}})
        return str(function.__code__.co_freevars[int(cell[1])]) + path[cell.end() :]
    except Exception:  # Of something that is not the loss function's.
        return path


def _why_not(problem: Exception) -> str:
    """Return why Dynamo cannot capture the code, with the line of the user's code."""
    text = str(problem)
    places = re.findall(
        r'File "([^"]+)", line (\d+), in \S+\n\s*(.*)', text.partition("user code:")[2]
    )
    places = [place for place in places if not place[0].startswith((_TORCH, _HERE, *_PYTHON))]
    file, number, code = places[-1] if places else ("", "", "")
    where = f" ({Path(file).name}, line {number}: {code.strip()})" if places else ""
    if any(word.lower() in text.lower() for word in _READS_VALUES):
        return f"its code branches on the value of a tensor{where}"
    return f"Dynamo cannot follow its code: {first_line(problem)}{where}"
