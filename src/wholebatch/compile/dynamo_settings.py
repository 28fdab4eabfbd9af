"""What Dynamo is told while it captures a micro-step, and what it can follow beyond its own.

Functions that are replaced here do something else in code that Dynamo runs, and nowhere else:
another thread that calls them meanwhile gets the original.
"""

from __future__ import annotations

import enum
import importlib.metadata
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wholebatch.compile.execute_mode import CannotTrace
from wholebatch.window.replaced_attributes import replaced_attributes


class Unlisted(set[Any]):
    """A set of functions that is empty when it is listed.

    torch 2.11 sorts its settings for a log of its own. Functions have no order, so it would print a
    traceback at each capture.
    """

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@contextmanager
def dynamo_settings(*, is_compiling: bool) -> Iterator[None]:
    """Let Dynamo take numbers as constants, guard hooks too, and pass over what only tells.

    `is_compiling` is what `torch.compiler.is_compiling()` answers.
    """
    from torch._dynamo import config, symbolic_convert
    from torch._dynamo.variables import ConstDictVariable, TensorVariable, UserDefinedClassVariable
    from torch._dynamo.variables import torch as functions_of_torch

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
        "ignore_logging_functions": Unlisted(tells),
        "reorderable_logging_functions": Unlisted({print, warnings.warn}),
    }
    lookups = {_LOOKUP: _missing_keys_guarded(getattr(ConstDictVariable, _LOOKUP))}
    is_stdlib = symbolic_convert.is_stdlib
    asked = {"is_stdlib": lambda module: module is not os and is_stdlib(module)}
    reads = {}
    if not hasattr(UserDefinedClassVariable, "resolve_cls_plain_attr"):  # before torch 2.13
        reads["var_getattr"] = _class_attributes_guarded(UserDefinedClassVariable.var_getattr)
    # Here Dynamo looks up what these functions answer; the dictionary is made once.
    answers: dict[Any, Any] = functions_of_torch.tracing_state_functions()
    with (
        config.patch(wanted),
        _items_replaced(answers, {torch.compiler.is_compiling: is_compiling}),
        replaced_attributes(ConstDictVariable, **lookups),
        replaced_attributes(TensorVariable, method_storage_offset=_refuse_offset),
        replaced_attributes(UserDefinedClassVariable, **reads),
        replaced_attributes(symbolic_convert, **asked),  # os.getenv reads the environment.
    ):
        yield


@contextmanager
def _items_replaced(dictionary: dict[Any, Any], items: dict[Any, Any]) -> Iterator[None]:
    before = dict(dictionary)
    dictionary.update(items)
    try:
        yield
    finally:
        dictionary.update(before)


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


def _refuse_offset(*_: Any, **__: Any) -> Any:
    """Refuse code that asks where a tensor lies in its storage: no guard is about that."""
    raise CannotTrace("its code reads storage_offset of a tensor")


_TELLING = ("debug", "info", "warn", "error", "critical", "exception")
"""The names of a logger's methods begin like this, those that libraries have added too."""

# ------------------------------------------------------------- what Dynamo cannot follow by itself


REASON = "wholebatch: "
"""Marks a reason of ours in a message of Dynamo's."""


class _Uniform:
    """A random number between 0 and 1 that answers only what is the same for all of them."""

    def __lt__(self, bound: float) -> bool:
        if 0 < bound < 1:
            raise RuntimeError("a decision by a random number")
        return bound >= 1


def _rand(*size: Any, **more: Any) -> Any:
    if torch.compiler.is_dynamo_compiling() and len(size) == 1 and size[0] == []:
        return _Uniform()
    return _RAND(*size, **more)


def _apply(
    module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Convert nothing in captured code, and refuse what would convert something."""
    if not torch.compiler.is_dynamo_compiling():
        return _APPLY(module, function, recurse)  # type: ignore[no-any-return, no-untyped-call]
    for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
        converted = function(tensor)
        if converted.dtype != tensor.dtype or converted.device != tensor.device:
            raise RuntimeError(f"{REASON}its forward casts or moves a {type(module).__name__}")
    return module


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def grouped_mm(left: Tensor, right: Tensor, **more: Any) -> Tensor:
    """Multiply groups of rows in autocast's dtype, which must be bfloat16.

    Autocast does not know this operation. In other dtypes torch can neither trace nor record it: it
    reads the sizes of the groups on the host.
    """
    device = right.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        left, right = left.to(dtype), right.to(dtype)
    if right.dtype is not torch.bfloat16:
        kind = str(right.dtype).removeprefix("torch.")
        raise CannotTrace(
            f"{REASON}its experts multiply groups of tokens in {kind}, which reads their sizes on "
            "the host: bfloat16 (precision=bf16) does not"
        )
    product: Tensor = _GROUPED_MM(left, right, **more)
    return product


def _check_all_with(kind: Any, condition: Tensor, message: Any = None) -> Any:
    """Assert on the device, in the graph, instead of reading the result."""
    if not torch.compiler.is_dynamo_compiling():
        return _CHECKS_WITH(kind, condition, message)
    text = "an assertion of the model's code failed"
    return torch.ops.aten._assert_async.msg(condition.all(), text)


def _check_all(condition: Tensor, message: Any = None) -> Any:
    if not torch.compiler.is_dynamo_compiling():
        return _CHECKS(condition, message)
    return _check_all_with(RuntimeError, condition)


def _grouped(left: Tensor, right: Tensor, **more: Any) -> Tensor:
    if torch.compiler.is_dynamo_compiling():
        product: Tensor = grouped_mm(left, right, **more)
        return product
    original: Tensor = _GROUPED_MM(left, right, **more)
    return original


def _can_use_grouped(*arguments: Any) -> bool:
    """Take the grouped product in captured code, too: transformers would take a loop instead."""
    if torch.compiler.is_dynamo_compiling():
        return True
    return bool(_ORIGINALS["_can_use_grouped_mm"](*arguments))


def _metadata(name: str) -> Any:
    return _METADATA(name)


def _version(name: str) -> str:
    return _VERSION(name)


_RAND: Any = torch.rand
_APPLY = nn.Module._apply
_CHECKS: Any = torch._check_tensor_all
_CHECKS_WITH: Any = torch._check_tensor_all_with
_GROUPED_MM: Any = functional.grouped_mm
_METADATA, _VERSION = importlib.metadata.metadata, importlib.metadata.version
_ORIGINALS: dict[str, Any] = {}
_FUNCTIONS = (
    *(_rand, _apply, _check_all, _check_all_with, _grouped),
    *(_can_use_grouped, _metadata, _version),
)
REPLACEMENTS = (*_FUNCTIONS, *(function.__code__ for function in _FUNCTIONS))
"""What stands in for functions of others during a capture: no guard may be about it."""


@contextmanager
def can_follow_more() -> Iterator[None]:
    """Within this context, Dynamo can follow more code.

    - LayerDrop with a probability of 0: models of transformers compare `torch.rand([])` with it.
    - `module.to()` in a forward, if it converts nothing.
    - Grouped products of experts, which follow autocast as `linear` does.
    - Assertions on tensors.
    - Questions for installed packages: these stay the same.
    """
    for constant in (_metadata, _version):  # Not as a decorator: that would import Dynamo.
        torch.compiler.assume_constant_result(constant)
    checks = {"_check_tensor_all": _check_all, "_check_tensor_all_with": _check_all_with}
    of_torch: dict[str, Any] = {"rand": _rand, **checks}
    experts: Any = sys.modules.get("transformers.integrations.moe")
    choices = {}
    if hasattr(experts, "_can_use_grouped_mm"):
        _ORIGINALS["_can_use_grouped_mm"] = experts._can_use_grouped_mm
        choices = {"_can_use_grouped_mm": _can_use_grouped}
    with (
        replaced_attributes(torch, **of_torch),
        replaced_attributes(functional, grouped_mm=_grouped),
        replaced_attributes(nn.Module, _apply=_apply),
        replaced_attributes(experts or _Uniform, **choices),
        replaced_attributes(importlib.metadata, metadata=_metadata, version=_version),
    ):
        yield
