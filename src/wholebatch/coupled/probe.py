"""Change one sample and see whose outputs move."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch import randomness
from wholebatch.coupled.apart import Apart, Outside, loss_apart
from wholebatch.coupled.fixed import FixedNorms
from wholebatch.errors import LossError, SplitError
from wholebatch.splitting import to_device
from wholebatch.splitting.layout import BatchSize, Layout, Static, layout_of, take
from wholebatch.splitting.structure import flatten

__all__ = ["FUNCTION", "Probe"]

_SAMPLES = 8
_TOLERANCE = 1e-5

FUNCTION = "(the function itself)"
"""Stands for the name of a module where it is the forward function, and none of the modules."""

Forward = Callable[[Any, Any], Any]
_Rows = tuple[list[Tensor], list[Tensor]]
_Traced = dict[tuple[str, int], _Rows]


class Probe:
    """Runs a model on the first few samples of a batch, without a backward, and leaves no trace.

    `norms` are its BatchNorms that use the batch: known, and so kept from coupling while it looks
    for what else does. `forward(model, batch)` says how the model is called. Buffers and random
    generators are left as found.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        *,
        norms: Sequence[tuple[str, nn.Module]] = (),
        forward: Forward | None = None,
        device: torch.device | None = None,
        batch_size: BatchSize = None,
        static: Static = (),
        parts: int = 1,
    ) -> None:
        """`parts`: in so many the batch will be trained on.

        A forward that holds nothing for a backward takes about a third of what one part will take.
        """
        self._model = model
        self._norms = norms
        call = _call if forward is None else forward
        self._call = call if device is None else _there(call, device)
        self._layout = _layout(batch, batch_size, static)
        self._needs_graph = False
        size = 0 if self._layout is None else self._layout.size
        self._count = min(size, _SAMPLES, 3 * -(-size // parts))

    def moved_by_another_sample(self, known: Collection[str] = ()) -> list[str]:
        """Names of the modules whose output for one sample moves when another sample changes.

        A module is named if what it was given for the unchanged samples stayed the same and what it
        gave back for them did not: the origin, not all that lies behind it. Of nested modules, the
        innermost; `FUNCTION`, if it is in no module. Those that are `known` are left out. The model
        runs three times on at most 8 samples; of every output two numbers per sample are kept.
        """
        layout, count = self._layout, self._count
        if layout is None or count < 2:
            return []
        with _Unchanged(self._model), FixedNorms(self._norms) as fixed:
            origins = [o for o in self._origins(layout, count, fixed) if o not in known]
            if origins and count > 2:
                # A dimension that happens to be as long as the samples are many is told by another
                # number of them.
                fewer = self._origins(layout, count - 1, fixed)
                origins = [name for name in origins if name in fewer]
        return origins

    def loss_apart(self) -> Apart | Outside | None:
        """The loss of the samples beside that of their halves, where it is not the same loss."""
        layout, count = self._layout, self._count
        if layout is None or count < 2:
            return None
        with _Unchanged(self._model), FixedNorms(self._norms) as fixed:
            return loss_apart(self._model, layout, count, self._call, fixed.begin)

    def _origins(self, layout: Layout, count: int, fixed: FixedNorms) -> list[str]:
        def traced(batch: Any) -> _Traced:
            fixed.begin()
            with torch.set_grad_enabled(self._needs_graph):
                return _Trace(self._model, self._call, batch, count).rows

        few, changed = _few(layout, count, change=False), _few(layout, count, change=True)
        try:
            first = traced(few)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a function that takes gradients itself (a gradient penalty)
            if self._needs_graph:
                raise
            self._needs_graph = True
            first = traced(few)
        return _origins(first, traced(few), traced(changed))


def _there(call: Forward, device: torch.device) -> Forward:
    """The same, with the few samples (never the whole batch) on the model's device."""
    return lambda model, few: call(model, to_device(few, device))


def _layout(batch: Any, batch_size: BatchSize, static: Static) -> Layout | None:
    try:
        return layout_of(batch, batch_size=batch_size, static=static)
    except SplitError:  # it cannot be told: as many as the first tensor says
        tensors = [leaf.value for leaf in flatten(batch)[0] if isinstance(leaf.value, Tensor)]
        sizes = [len(tensor) for tensor in tensors if tensor.dim()]
        return layout_of(batch, batch_size=sizes[0], static=static) if any(sizes[:1]) else None


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

    def __init__(self, model: nn.Module, call: Forward, batch: Any, count: int) -> None:
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
                self.rows[FUNCTION, 0] = ([], self._others(call(model, batch)))
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


class _Unchanged:
    """Leaves buffers and random generators as they were before the probe, and warns of nothing."""

    def __init__(self, model: nn.Module) -> None:
        self._saved = [
            (buffer, buffer.detach().clone())
            for buffer in model.buffers()
            if not nn.parameter.is_lazy(buffer)
        ]
        self._random = randomness.capture()

    def __enter__(self) -> None:
        # What is odd about a forward without a graph (checkpoints say so) is not the user's doing.
        self._quiet = warnings.catch_warnings()
        self._quiet.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *exc: object) -> None:
        self._quiet.__exit__(None, None, None)
        randomness.restore(self._random)
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
        gap = (left.double() - right.double()).abs().max()
        worst = max(worst, float(gap / left.double().abs().max().clamp_min(1e-30)))
    return worst


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
