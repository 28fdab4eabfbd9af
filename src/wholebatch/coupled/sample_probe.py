"""Change one sample and see whose outputs move."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.core.splitting.samples import Layout, flatten, take
from wholebatch.coupled.sample_runs import Few
from wholebatch.errors import LossError

__all__ = ["FUNCTION", "origins"]

_TOLERANCE = 1e-5

FUNCTION = "(the function itself)"
"""Stands for the name of a module where it is the forward function, and none of the modules."""

_Rows = tuple[list[Tensor], list[Tensor]]
_Traced = dict[tuple[str, int], _Rows]


def origins(few: Few, count: int, known: Collection[str] = ()) -> list[str]:
    """Return the modules whose output for one sample moves when another sample changes.

    A module is named if what it was given for the unchanged samples stayed the same and what it
    gave back for them did not: the origin, not all that lies behind it. Of nested modules, the
    innermost; `FUNCTION`, if it is in no module. Those that are `known` are left out. The first
    `count` samples run three times, without a backward; of every output two numbers per sample are
    kept.
    """
    if count < 2:
        return []
    found = [name for name in _origins_of(few, count) if name not in known]
    if found and count > 2:
        # A dimension that happens to be as long as the samples are many is told by another
        # number of them.
        fewer = _origins_of(few, count - 1)
        found = [name for name in found if name in fewer]
    return found


def _origins_of(few: Few, count: int) -> list[str]:
    plain, changed = _few(few.layout, count, change=False), _few(few.layout, count, change=True)

    def traced(batch: Any, *, graph: bool = False) -> _Traced:
        few.start.restore()
        few.fixed.begin()
        with torch.set_grad_enabled(graph):
            return _Trace(few.model, few.run, batch, count).rows

    try:
        first, graph = traced(plain), False
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # a function that takes gradients itself (a gradient penalty)
        first, graph = traced(plain, graph=True), True
    return _origins(first, traced(plain, graph=graph), traced(changed, graph=graph))


def _origins(before: _Traced, again: _Traced, after: _Traced) -> list[str]:
    origins: list[str] = []
    for key, (inputs, outputs) in before.items():
        if key not in after or key not in again:
            continue  # the path through the model depends on the sample itself
        noise = _distance(outputs, again[key][1])
        given = _distance(inputs, after[key][0])
        got = _distance(outputs, after[key][1])
        name = key[0]
        inside = bool(origins) if name == FUNCTION else _is_around(name, origins)
        if given <= _TOLERANCE and got > _TOLERANCE + 10 * noise and not inside:
            origins.append(name)
    return origins


def _is_around(name: str, others: Sequence[str]) -> bool:
    """Whether a module of that name is one of the others, or holds one."""
    return any(other == name or other.startswith(f"{name}." if name else "") for other in others)


def _few(layout: Layout, count: int, *, change: bool) -> Any:
    """A batch of the first samples; changed, the first of them is another one."""
    values = []
    for leaf, batched in zip(layout.leaves, layout.batched, strict=True):
        value = leaf.value
        if batched:
            value = take(value, slice(0, count))
            value = _replaced_first(value) if change else value
        values.append(value)
    return layout.structure.build(values)


def _replaced_first(value: Any) -> Any:
    # Another sample's values are valid ones whatever they mean: pixels, token numbers, labels.
    if not isinstance(value, Tensor):
        if isinstance(value, (list, tuple)):
            return type(value)([value[1], *value[1:]])
        changed = copy.deepcopy(value)
        changed[0] = value[1]
        return changed
    other = next((k for k in range(1, len(value)) if not torch.equal(value[k], value[0])), None)
    changed = value.detach().clone()
    if other is not None:
        changed[0] = value[other]
    elif value.is_floating_point():
        changed[0] = value[0] + 1
    return changed


class _Trace:
    """Per call of a module: what stands for its inputs' and outputs' rows of all samples but one.

    A row is kept as its norm and its product with a fixed vector of signs: what would take the
    memory of all activations takes two numbers per sample.
    """

    def __init__(self, model: nn.Module, run: Callable[[Any], Any], batch: Any, count: int) -> None:
        self.rows: _Traced = {}
        self._count = count
        self._signs: dict[tuple[int, torch.device], Tensor] = {}
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
        try:
            for name, module in model.named_modules():
                handles.append(module.register_forward_pre_hook(entering, with_kwargs=True))
                handles.append(module.register_forward_hook(leaving(name), with_kwargs=True))
            torch.manual_seed(0)
            with suppress(LossError):  # a loss function's result cannot lead back from here
                self.rows[FUNCTION, 0] = ([], self._others(run(batch)))
        finally:
            for handle in handles:
                handle.remove()

    def _others(self, tree: Any) -> list[Tensor]:
        found: list[Tensor] = []
        for leaf in flatten(tree)[0]:
            tensor = leaf.value
            if (
                isinstance(tensor, Tensor)
                and tensor.dim()
                and tensor.shape[0] == self._count
                and tensor.layout is torch.strided
            ):
                found.append(self._digest(tensor.detach()[1:]))
        return found

    def _digest(self, rows: Tensor) -> Tensor:
        if not rows.numel():
            return rows.new_zeros(2, dtype=torch.float64)
        if rows.is_complex():
            rows = torch.view_as_real(rows)
        if not rows.is_floating_point():
            rows = rows.float()
        flat = rows[:, None, None]
        if rows.dim() > 1:
            flat = rows.reshape(len(rows), -1, rows.shape[-1])
        size = torch.linalg.vector_norm(flat, dim=(1, 2), dtype=torch.float64)
        mixed = (flat @ self._signs_of(flat)).double()
        places = torch.arange(1, flat.shape[1] + 1, device=flat.device).double()
        return torch.cat([size, (mixed * places.sqrt()).sum(1)])

    def _signs_of(self, rows: Tensor) -> Tensor:
        key = (rows.shape[-1], rows.device)
        if key not in self._signs:
            made = torch.Generator().manual_seed(rows.shape[-1])
            signs = torch.randint(0, 2, (rows.shape[-1],), generator=made) * 2.0 - 1.0
            self._signs[key] = signs.to(rows.device)
        return self._signs[key].to(rows.dtype)


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest difference relative to the largest value; inf where shapes differ."""
    if len(a) != len(b):
        return float("inf")
    worst = 0.0
    for left, right in zip(a, b, strict=True):
        if left.shape != right.shape:
            return float("inf")
        gap = (left.double() - right.double()).abs().max()
        worst = max(worst, float(gap / left.double().abs().max().clamp_min(1e-30)))
    return worst
