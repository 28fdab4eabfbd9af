"""Change one sample and see whose outputs move."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["moved_by_another_sample"]

_SAMPLES = 8


def moved_by_another_sample(
    model: nn.Module, batch: Any, *, forward: Callable[[nn.Module, Any], Any] | None = None
) -> list[str]:
    """Names of the modules whose output for one sample moves when another sample changes.

    A module is named if what it was given for the unchanged samples stayed the same and what it
    gave back for them did not: the origin, not all that lies behind it. Of nested modules, the
    innermost.
    """
    call = _call if forward is None else forward
    size = _size(batch)
    if size is None or size < 2:
        return []
    count = min(size, _SAMPLES)
    few = _map(batch, lambda leaf: leaf[:count] if _per_sample(leaf, size) else leaf)
    changed = _map(few, lambda leaf: _replace_first(leaf) if _per_sample(leaf, count) else leaf)
    with _Unchanged(model):
        before = _Trace(model, call, few, count).rows
        again = _Trace(model, call, few, count).rows
        after = _Trace(model, call, changed, count).rows
    origins: list[str] = []
    for key, (inputs, outputs) in before.items():
        if key not in after or key not in again:
            continue  # the path through the model depends on the sample itself
        noise = _distance(outputs, again[key][1])
        given = _distance(inputs, after[key][0])
        got = _distance(outputs, after[key][1])
        name = key[0]
        inside = any(
            other == name or other.startswith(f"{name}." if name else "") for other in origins
        )
        if given <= _TOLERANCE and got > _TOLERANCE + 10 * noise and not inside:
            origins.append(name)
    return origins


_TOLERANCE = 1e-5
_Rows = tuple[list[Tensor], list[Tensor]]


class _Trace:
    """Per call of a module: its inputs' and outputs' rows of every sample but the first."""

    def __init__(
        self, model: nn.Module, call: Callable[[nn.Module, Any], Any], batch: Any, count: int
    ) -> None:
        self.rows: dict[tuple[str, int], _Rows] = {}
        self._count = count
        calls: dict[str, int] = {}
        entered: list[list[Tensor]] = []

        def entering(module: nn.Module, args: Any, kwargs: Any) -> None:
            entered.append(self._others((args, kwargs)))

        def leaving(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                index = calls[name] = calls.get(name, -1) + 1
                self.rows[name, index] = (entered.pop(), self._others(output))

            return hook

        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(entering, with_kwargs=True))
            handles.append(module.register_forward_hook(leaving(name), with_kwargs=True))
        try:
            with torch.random.fork_rng(enabled=True):
                torch.manual_seed(0)
                call(model, batch)
        finally:
            for handle in handles:
                handle.remove()

    def _others(self, tree: Any) -> list[Tensor]:
        found: list[Tensor] = []

        def take(leaf: Tensor) -> Tensor:
            if leaf.dim() and leaf.shape[0] == self._count:
                rows = leaf.detach()[1:]
                found.append(rows.double() if leaf.is_floating_point() else rows.clone())
            return leaf

        _map(tree, take)
        return found


class _Unchanged:
    """Leaves the model's buffers as they were before the probe."""

    def __init__(self, model: nn.Module) -> None:
        self._saved = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        with torch.no_grad():
            for buffer, saved in self._saved:
                buffer.copy_(saved)


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest difference relative to the largest value; inf where shapes differ."""
    if len(a) != len(b):
        return float("inf")
    worst = 0.0
    for left, right in zip(a, b, strict=True):
        if left.shape != right.shape:
            return float("inf")
        if left.numel():
            gap = (left.double() - right.double()).abs().max()
            worst = max(worst, float(gap / left.double().abs().max().clamp_min(1e-30)))
    return worst


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _replace_first(leaf: Tensor) -> Tensor:
    # Another sample's values are valid ones whatever they mean: pixels, token numbers, labels.
    other = next((k for k in range(1, len(leaf)) if not torch.equal(leaf[k], leaf[0])), None)
    changed = leaf.detach().clone()
    if other is not None:
        changed[0] = leaf[other]
    elif leaf.is_floating_point():
        changed[0] = leaf[0] + 1
    return changed


def _per_sample(leaf: Tensor, size: int) -> bool:
    return leaf.dim() > 0 and leaf.shape[0] == size


def _size(batch: Any) -> int | None:
    sizes: list[int] = []

    def look(leaf: Tensor) -> Tensor:
        if leaf.dim():
            sizes.append(leaf.shape[0])
        return leaf

    _map(batch, look)
    return sizes[0] if sizes else None


def _map(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        items = {key: _map(value, function) for key, value in tree.items()}
        return items if type(tree) is dict else type(tree)(items)  # type: ignore[call-arg]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(value, function) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map(value, function) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: _map(getattr(tree, f.name), function) for f in dataclasses.fields(tree)}
        return dataclasses.replace(tree, **fields)
    return tree
