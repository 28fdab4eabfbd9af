"""The guard set of a captured program: it tells when something that its code reads has changed.

Dynamo writes down a guard for everything that the code of the model and of the loss function reads:
globals, attributes behind methods and properties, classes, other modules, items of containers. A
graph runs only while its guards hold; they are checked at every micro-step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from wholebatch.compile.capture import Capture, Place
from wholebatch.compile.dynamo_settings import REPLACEMENTS
from wholebatch.compile.execute_mode import CannotTrace
from wholebatch.compile.graph_inputs import Inputs
from wholebatch.compile.model_parts import ModelParts
from wholebatch.compile.source_names import value_and_line
from wholebatch.window.autograd_graph import version_of

_ARRAY = 2**14
"""The most numbers of a NumPy array that are compared at every micro-step."""


class GuardSet:
    """The guards of one capture of `loss(model, micro)`, and its program."""

    def __init__(
        self,
        loss: Callable[[Any, Any], Any],
        model: nn.Module,
        inputs: Inputs,
        *,
        open_places: Sequence[Sequence[Place]] = (),
    ) -> None:
        """Capture it; raise CannotTrace if Dynamo cannot, or if the code writes something."""
        self._loss = loss
        self._parts = ModelParts(model)
        capture = Capture(loss, model, inputs, self._parts, open_places=open_places)
        self.program, self._manager = capture.run(self._is_checked)
        self._outside = {id(tensor): name for name, tensor in capture.outside}
        self._arrays = []
        for name, shared in capture.arrays:
            if shared.numel() > _ARRAY:
                raise CannotTrace(f"it reads the large NumPy array {name}: make it a tensor")
            array = shared.numpy()
            self._arrays.append((name, array, array.tobytes()))
        self._watched: list[tuple[str, Tensor, Any]] = []

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
        return value_and_line(parts[0] if parts else "", self._loss)

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Count a write into one of these tensors, whose values a graph contains, as a change."""
        self._watched += [
            (self._outside.get(id(tensor), "a tensor"), tensor, _written(tensor))
            for tensor in tensors
        ]

    def accept_tensors(self) -> None:
        """Take tensors as unchanged: all were put back, which counts as a write into each."""
        self._watched = [(name, tensor, _written(tensor)) for name, tensor, _ in self._watched]

    def _written_into(self) -> str | None:
        """Return the name of a tensor or array that is watched and has other values, or None."""
        for name, tensor, before in self._watched:
            if _written(tensor) != before:
                return name
        for name, array, values in self._arrays:
            if array.tobytes() != values:
                return name
        return None

    def _locals(self, model: nn.Module, micro: Any) -> dict[str, Any]:
        return {"function": self._loss, "args": (model, micro)}

    def _is_checked(self, guard: Any) -> bool:
        """Leave out guards on arrays and hooks, which `hold` compares, and on what is replaced."""
        if guard.guard_type == "TENSOR_MATCH":
            return not str(guard.name).startswith("___from_numpy(")
        if guard.guard_type == "EMPTY_NN_MODULE_HOOKS_DICT":
            return not self._parts.include(guard.value)
        return not any(guard.value is replacement for replacement in REPLACEMENTS)


def _written(tensor: Tensor) -> tuple[int, int]:
    """Return what differs after a write into a tensor, or after other memory was put into it."""
    return version_of(tensor), tensor.data_ptr()


_MAKE = ("__init__", "__setstate__")
"""Methods that make a module: Dynamo replaces them when it is first used."""


class TorchFunctions:
    """The functions of torch that code may call, for which Dynamo has no guards."""

    def __init__(self, model: nn.Module) -> None:
        kinds = {base for module in model.modules() for base in type(module).__mro__}
        of_torch = [kind for kind in kinds if kind.__module__.startswith("torch.nn.")]
        self._functions = []
        for owner in (torch, functional, Tensor, *of_torch):
            named = {
                name: value
                for name, value in vars(owner).items()
                if callable(value) and name not in _MAKE
            }
            self._functions.append((owner, list(named), list(named.values())))

    def are_unchanged(self) -> bool:
        """True if none of them has been replaced since."""
        return all(
            all(map(operator.is_, map(vars(owner).get, names), values))
            for owner, names, values in self._functions
        )
