"""Tools for traced graphs: recognise nodes, and check a kernel before its use."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch import fx

from wholebatch.compile.disk_cache import claimed, marks

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default)
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_mm.default)
"""Operations that return a matrix in newly allocated memory."""
_EXTERNAL = (*PRODUCTS, aten.baddbmm.default, aten.convolution.default)
"""Operations that are kernels of a library: nothing is fused across them."""
OURS = ("aten", "prims", "wholebatch")
"""The namespaces of operations that are not the user's own."""
_CHEAP = (aten._to_copy.default, aten._unsafe_view.default)
"""Operations without torch's tag for pointwise ones that compute each number from one number."""

ANY_STRIDES: dict[str, Any] = (
    {"tags": (torch.Tag.flexible_layout,)}
    if "tags" in signature(torch.library.custom_op).parameters
    else {}
)
"""The option of an operation that takes tensors of any strides: Inductor copies none for it."""


def operation(
    name: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    writes: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """Define an operation of this package; `fake` returns results that are not computed."""
    made = torch.library.custom_op(f"wholebatch::{name}", run, mutates_args=writes, **options)
    made.register_fake(fake)
    return getattr(torch.ops.wholebatch, name).default


def cast_to(node: fx.Node) -> torch.dtype | None:
    """Return the target dtype if this node is a cast and nothing else."""
    if node.target is not aten._to_copy.default:
        return None
    dtype = node.kwargs.get("dtype")
    others = {k: v for k, v in node.kwargs.items() if k not in ("dtype", "layout", "device")}
    return dtype if isinstance(dtype, torch.dtype) and not any(others.values()) else None


@dataclass(frozen=True)
class Added:
    """The node that adds a gradient, and the buffer that it is added into."""

    addition: fx.Node
    buffer: fx.Node


def added_into_buffer(part: fx.Node) -> Added | None:
    """Return where this gradient is added into a buffer, if that is its only use."""
    while len(part.users) == 1:
        [user] = part.users
        if user.target is aten.add_.Tensor and user.args[1:] == (part,):
            buffer = user.args[0]
            assert isinstance(buffer, fx.Node)
            fits = buffer.op == "placeholder" and not user.kwargs and not user.users
            return Added(user, buffer) if fits else None
        if user.target is not aten.view.default and cast_to(user) is not torch.float32:
            return None
        part = user
    return None


def column_sum_into_buffer(node: fx.Node, columns: int) -> Added | None:
    """Return where the sum of its rows (the gradient of a bias) is added into a buffer."""
    for reader in (node, *(user for user in node.users if user.target is aten.view.default)):
        value = reader.meta.get("val")
        is_matrix = value is not None and value.dim() == 2 and value.shape[1] == columns
        for user in reader.users if is_matrix else ():
            if user.target is aten.sum.dim_IntList and user.args[1] == [0]:
                added = added_into_buffer(user)
                if added is not None:
                    return added
    return None


def same_shape(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """True if the shapes are always equal. It adds no guard on a symbol."""
    return len(one) == len(other) and all(
        bool(expression_of(a) == expression_of(b)) for a, b in zip(one, other, strict=True)
    )


def expression_of(size: Any) -> Any:
    """Return the expression of a symbolic size, and a number as it is."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat)) else size


def _by_target(about: Callable[[Any], bool]) -> Callable[[fx.Node], bool]:
    """Answer for the operation of a node, and ask torch once for each: to ask is slow."""
    known = cache(about)
    return wraps(about)(lambda node: known(node.target))


@_by_target
def is_view(target: Any) -> bool:
    """True if the result lies in the memory of an argument, and nothing is written."""
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return target is aten._unsafe_view.default or target.is_view


@_by_target
def is_cheap(target: Any) -> bool:
    """True if a compiler computes it within the kernel that needs it."""
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return torch.Tag.pointwise in target.tags or target in _CHEAP or target.is_view


@_by_target
def is_external(target: Any) -> bool:
    """True if it is a kernel of a library."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return (
        target in _EXTERNAL
        or target.namespace not in ("aten", "prims")
        or "attention" in target.name()
        or "convolution" in target.name()
    )


def readers_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operations that read its memory, through views."""
    for user in node.users:
        if user.op == "call_function":
            if is_view(user) or user.target is getitem:
                yield from readers_of(user)
            else:
                yield user


@cache
def written_arguments(target: Any) -> list[tuple[int, str]]:
    """Return the place and the name of each argument that this operation writes."""
    schema = getattr(target, "_schema", None)
    arguments = enumerate(() if schema is None else schema.arguments)
    return [(at, a.name) for at, a in arguments if a.alias_info and a.alias_info.is_write]


def written_by(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes whose memory this operation writes."""
    for place, name in written_arguments(node.target):
        given = node.args[place] if place < len(node.args) else None
        given = node.kwargs.get(name, given)
        yield from (one for one in _leaves(given) if isinstance(one, fx.Node))


def drop_unused(graph: fx.Graph) -> None:
    """Remove operations without effects whose results nothing reads; torch's pass is slower."""
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


def _leaves(part: Any) -> list[Any]:
    if isinstance(part, (list, tuple)):
        return [leaf for one in part for leaf in _leaves(one)]
    return [part]


def base_of(node: fx.Node) -> fx.Node:
    """Return the node in whose memory this result lies."""
    while node.op == "call_function":
        if is_view(node):
            node = node.all_input_nodes[0]
        else:
            written = list(written_by(node))
            if len(written) != 1:
                break
            node = written[0]
    return node


def fixed(part: Any) -> Any:
    """Return a hashable form of arguments that tells 1 from 1.0 and True; a node is its name."""
    if isinstance(part, (list, tuple)):
        return tuple(map(fixed, part))
    if isinstance(part, dict):
        return tuple((name, fixed(one)) for name, one in part.items())
    return repr(part)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause Python's garbage collector within this context.

    Tracing, compiling and predicting make so many objects, and few cycles, that the collector takes
    a tenth of their time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def once_per_machine(check: Callable[[torch.device], bool]) -> Callable[[torch.device], bool]:
    """Let `check(device)`, a test of kernels, run once; a good answer is kept in the disk cache.

    It holds for devices of the same name, and for the same versions of everything that computes.
    """

    @wraps(check)
    def verdict(device: torch.device) -> bool:
        if device.type != "cuda":
            return check(device)
        if is_checked(check, device):
            return True
        mark = _mark(check, device)
        with claimed(mark, patience=20.0) as ours:
            right = not ours or check(device)
            if right:
                with suppress(OSError):  # The cache cannot be written.
                    mark.touch()
        return right

    return cache(verdict)


def is_checked(check: Callable[[torch.device], bool], device: torch.device) -> bool:
    """True if the disk cache holds a good answer of this check."""
    return device.type == "cuda" and _mark(check, device).exists()


def _mark(check: Callable[[torch.device], bool], device: torch.device) -> Path:
    return marks() / f"{check.__module__}.{check.__name__}-{versions_of(device)}"


@cache
def versions_of(device: torch.device) -> str:
    """Return a hash of the device's name and driver, of torch and Triton, and of this package."""
    parts = [torch.__version__, torch.version.cuda, torch.cuda.get_device_name(device)]
    with suppress(PackageNotFoundError):
        parts.append(version("triton"))
    with suppress(OSError):
        parts.append(Path("/proc/driver/nvidia/version").read_text())
    found = hashlib.sha256(str(parts).encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()[:32]


class _Unusable(Exception):
    """Raised if the operation cannot run."""


def computes_rightly(
    device: torch.device,
    operation: Callable[[], Any],
    agrees: Callable[[Callable[..., Any], torch.device], bool],
) -> bool:
    """True if this device has the kernels and this operation passes `agrees`.

    `agrees(run, device)` runs it on test data and compares. It must not draw random numbers, so
    that the user's generators are left alone.
    """
    if device.type != "cuda":
        return False
    try:
        import_module("wholebatch.compile.triton_kernels")
    except ImportError:
        return False

    def run(*given: Any) -> Any:
        try:
            return operation()(*given)
        except Exception as problem:  # A compiler may raise anything; the unfused code still works.
            raise _Unusable from problem

    try:
        return agrees(run, device)
    except _Unusable:
        return False
