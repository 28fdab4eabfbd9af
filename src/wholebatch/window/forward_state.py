"""The state of a model beside its weights: put back before a window begins again.

A window that begins again (out of memory, a replay) must find what the first try found. A forward
moves BatchNorm's running statistics, other buffers, attributes of the user's own modules and random
generators. Buffers and generators are put back exactly. Of the attributes a shallow copy is made: a
counter, or a tensor that was bound anew, is put back. What changes inside of an object (the entries
of a list, a tensor that is no buffer) stays as the forward has left it.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from wholebatch.errors import StateError

# Wrappers keep the books of their engine in attributes; those are not the model's.
_WRAPPERS = (
    "torch.nn.parallel.",
    "torch.distributed.",
    "torch._dynamo.",
    "deepspeed.",
    "accelerate.",
    "lightning.fabric.",
    "lightning_fabric.",
)
# No state of a forward: the mode, and Transformers' note that hooks which record outputs are in
# place (those stay, and without the note they would be installed twice).
_KEPT = {"training", "_output_capturing_hooks_installed"}
_RESULT: Any = object()
"""Stands for a tensor of a graph: it is a result of the last forward, and stays as it is."""

Key: TypeAlias = tuple[nn.Module, str]
"""A module, and the name of a buffer or attribute of it."""


class ForwardState:
    """The buffers and attributes of modules, and the random generators, as they are now.

    As a context, it puts them back at its end.

    Args:
        models: The modules.
        every: False leaves out Python's and NumPy's generators, as for `capture_random`.
        generators: The user's own random generators, beside the global ones and those that are
            attributes of the modules.
    """

    def __init__(
        self, *models: nn.Module, every: bool = True, generators: Sequence[Any] = ()
    ) -> None:
        modules = dict.fromkeys(module for model in models for module in model.modules())
        own = [m for m in modules if not type(m).__module__.startswith(_WRAPPERS)]
        self._attributes = {module: _shallow_copy(module) for module in own}
        self._buffers = {module: dict(module._buffers) for module in modules}
        self._contents = _contents_of(self._buffers)
        held = (value for fields in self._attributes.values() for value in fields.values())
        found = {id(each): each for each in (*generators, *filter(is_generator, held))}
        self._generators = [(each, state_of(each)) for each in found.values()]
        self.random = capture_random(every=every)

    def __enter__(self) -> ForwardState:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    @torch.no_grad()
    def restore(self, *, random: bool = True) -> None:
        """Put everything back; without `random` only buffers and attributes."""
        for module, before in self._attributes.items():
            _put_back(vars(module), before)
        self.restore_buffers()
        if random:
            self.restore_random()

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Put the buffers back."""
        for module, before in self._buffers.items():
            _put_back(module._buffers, before)
            for name in before:  # a buffer that became an attribute
                vars(module).pop(name, None)
        for buffer, content in self._contents:
            if buffer.shape != content.shape:  # resized in place
                buffer.data = content.clone()
            else:
                buffer.copy_(content)

    def restore_random(self) -> None:
        """Put the random generators back."""
        restore_random(self.random)
        for generator, state in self._generators:
            set_state_of(generator, state)

    def draws_same(self, other: ForwardState, *, host: bool) -> bool:
        """True if torch's generators are at the same place; with `host`, Python's and NumPy's."""
        names = [name for name in self.random if (name in ("python", "numpy")) == host]
        own = zip(self._generators, other._generators, strict=False)
        return all(same_random(self.random[n], other.random.get(n)) for n in names) and all(
            same_random(was, now)
            for (generator, was), (_, now) in own
            if isinstance(generator, torch.Generator) != host
        )

    def values(self) -> dict[Key, Any]:
        """Return the buffers (copies) and the attributes that are tensors or numbers."""
        copies = {id(buffer): content for buffer, content in self._contents}
        values: dict[Key, Any] = {
            (module, name): value
            for module, fields in self._attributes.items()
            for name, value in fields.items()
            if isinstance(value, Tensor | int | float)
        }
        for module, buffers in self._buffers.items():
            values.update({(module, n): copies.get(id(b), b) for n, b in buffers.items()})
        return values


def is_same(a: Any, b: Any, tolerance: float = 0.0) -> bool:
    """True if two tensors or numbers are equal, up to a tolerance relative to the largest."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
            return False
        if torch.equal(a, b):
            return True
        if not a.is_floating_point() or a.layout is not torch.strided:
            return False
        a, b = a.detach().double(), b.detach().double()
        gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).max()
        largest = torch.maximum(a.abs(), b.abs()).nan_to_num(0.0, posinf=0.0).max()
        return bool(gap <= tolerance * largest)
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b or abs(a - b) <= tolerance * max(abs(a), abs(b)) or (a != a and b != b)
    return a is b


def _shallow_copy(module: nn.Module) -> dict[str, Any]:
    fields = {name: value for name, value in vars(module).items() if name not in _KEPT}
    for name, value in fields.items():
        if type(value) is Tensor and value.grad_fn is not None:
            fields[name] = _RESULT
    return fields


def _put_back(now: dict[str, Any], before: dict[str, Any]) -> None:
    """Let a dictionary hold what it held before; results stay."""
    for name in now.keys() - before.keys() - _KEPT:
        del now[name]
    for name, value in before.items():
        if value is not _RESULT and now.get(name, _RESULT) is not value:
            now[name] = value


@torch.no_grad()
def _contents_of(
    buffers: dict[nn.Module, dict[str, Tensor | None]],
) -> list[tuple[Tensor, Tensor]]:
    """Return each buffer with a copy of it."""
    contents: list[tuple[Tensor, Tensor]] = []
    # One operation copies all buffers of a dtype: a model with BatchNorms has hundreds of them.
    alike: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for buffer in {id(b): b for held in buffers.values() for b in held.values()}.values():
        if buffer is None or buffer.grad_fn is not None or nn.parameter.is_lazy(buffer):
            continue
        if type(buffer) is Tensor and buffer.layout is torch.strided:
            pair = (buffer, torch.empty_like(buffer, requires_grad=False))
            alike.setdefault((buffer.dtype, buffer.device), []).append(pair)
        else:
            pair = (buffer, buffer.detach().clone())
        contents.append(pair)
    for pairs in alike.values():
        torch._foreach_copy_([copy for _, copy in pairs], [buffer for buffer, _ in pairs])
    return contents


@contextmanager
def attributes_restored(owner: object) -> Iterator[None]:
    """Put back the attributes of an object, and copies of its containers of numbers."""
    own = vars(owner)
    before = {n: deepcopy(value) if _is_log(value) else value for n, value in own.items()}
    try:
        yield
    finally:
        own.clear()
        own.update(before)


def _is_log(value: Any) -> bool:
    """True for a container of numbers, or of such containers."""
    if not isinstance(value, dict | list | deque):
        return False
    held = value.values() if isinstance(value, dict) else value
    return all(_is_log(inner) or isinstance(inner, float | int) for inner in held)


# ------------------------------------------------------------ random generators


def is_array(value: Any) -> bool:
    """True for a NumPy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_generator(value: Any) -> bool:
    """True for a random generator: torch's, Python's or NumPy's."""
    if isinstance(value, (torch.Generator, random.Random)):  # no union: made anew in each call
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(
        value, (numpy.random.Generator, numpy.random.RandomState)
    )


def state_of(generator: Any) -> Any:
    """Return the state of a random generator, as a copy."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits = getattr(generator, "bit_generator", None)
    return generator.get_state(legacy=False) if bits is None else bits.state


def set_state_of(generator: Any, state: Any) -> None:
    """Put a random generator back."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def capture_random(*, every: bool = True) -> dict[str, Any]:
    """Return the generators' states; `every=False` leaves out Python's and NumPy's (cheaper)."""
    state: dict[str, Any] = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return {**state, **capture_python_random()} if every else state


def capture_python_random() -> dict[str, Any]:
    """Return the states of Python's generator and of NumPy's, if the program uses it already."""
    state: dict[str, Any] = {"python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        # Not as uint32: torch.save takes that dtype, plain pickle does not.
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    return state


def restore_random(state: dict[str, Any]) -> None:
    """Put every generator back to where it was captured."""
    if "torch" in state:
        torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state:
        here = torch.cuda.device_count()
        if here != len(state["cuda"]):
            raise StateError(
                f"random state of {len(state['cuda'])} CUDA devices, and {here} are here: "
                "resume on the same number of visible devices"
            )
        torch.cuda.set_rng_state_all([device.cpu() for device in state["cuda"]])
    if "python" in state:
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.cpu().numpy().astype("uint32"), *rest))


def same_random(a: Any, b: Any) -> bool:
    """Return True if two captured states are equal: nothing was drawn between them."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple) and type(a[0]) is int:  # Python's: 625 numbers, compared at once
        return bool(a == b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same_random(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_random(a[key], b[key]) for key in a)
    return bool((a == b).all()) if is_array(a) else bool(a == b)
