"""Losses that couple samples, in two passes over the micro-batches.

The first pass encodes every micro-batch without a graph. The loss of the whole batch is computed
from all representations, and its gradient is taken with respect to them. The second pass encodes
every micro-batch again, with the same random numbers and now with a graph, and sends its part of
that gradient through it. By the chain rule this is the gradient of the undivided batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch import randomness
from wholebatch.coupled.contrastive import Coupled
from wholebatch.errors import LossError, WindowError
from wholebatch.loss import Loss, Terms

__all__ = ["run_two_pass"]

Inject = Callable[[int, list[Tensor], list[Tensor]], None]


def _inject(index: int, outputs: list[Tensor], gradients: list[Tensor]) -> None:
    torch.autograd.backward(outputs, gradients)


def run_two_pass(
    coupled: Coupled,
    model: Any,
    micros: Sequence[Any],
    *,
    whole: Callable[[Loss | Terms], None],
    inject: Inject = _inject,
    moved: Callable[[Any], Any] = lambda micro: micro,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Add the gradient of `coupled.loss` over all `micros` into the parameters.

    `whole(loss)` is called once, with the loss of the whole batch, and runs its backward with the
    scale it wants. `inject(index, outputs, gradients)` runs the backward of a micro-batch, the last
    with `index == len(micros) - 1`; the scale is in the gradients already. Both passes call `moved`
    for a micro-batch. `gather`, where there are ranks, gives a representation's rows of all ranks
    with gradient. The caller's autocast applies to both passes alike.

    Buffers of the model are as after one pass; the random generators as after one pass.
    """
    buffers = [(b, b.detach().clone()) for m in _modules(model) for b in m.buffers()]
    starts: list[dict[str, Any]] = []
    encoded: list[_Leaves] = []
    with torch.no_grad():
        for micro in micros:
            starts.append(randomness.capture())
            encoded.append(_Leaves(coupled.encode(model, moved(micro))))
        for buffer, before in buffers:  # the second pass shall be the one that moves them
            buffer.copy_(before)
    first = encoded[0]
    leaves = [
        _whole(parts) for parts in zip(*(e.checked_like(first) for e in encoded), strict=True)
    ]
    given = leaves if gather is None else [gather(leaf) for leaf in leaves]
    whole(coupled.loss(first.rebuild(given)))
    gradients = [leaf.grad for leaf in leaves]
    cached = [leaf.detach() for leaf in leaves]
    del leaves, given
    farthest: list[Tensor] = []
    place = [0] * len(cached)
    for index, micro in enumerate(micros):
        randomness.restore(starts[index])
        again = _Leaves(coupled.encode(model, moved(micro))).checked_like(encoded[index])
        outputs: list[Tensor] = []
        parts: list[Tensor] = []
        for k, tensor in enumerate(again):
            rows = slice(place[k], place[k] + _rows(tensor))
            place[k] = rows.stop
            if tensor.is_floating_point():
                farthest.append(_distance(tensor.detach(), cached[k][rows].view_as(tensor)))
            gradient = gradients[k]
            if gradient is not None and tensor.requires_grad:
                outputs.append(tensor)
                parts.append(gradient[rows].view_as(tensor))
        inject(index, outputs, parts)
    if farthest:
        _check_replay(
            torch.stack([f.to(farthest[0].device) for f in farthest]).max(), cached, coupled
        )


class _Leaves:
    """The tensors of what `encode` returned, and its structure."""

    def __init__(self, tree: Any) -> None:
        self._tree: Any = None
        self.tensors: list[Tensor] = []
        self._tree = self._take(tree)

    def _take(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            self.tensors.append(tree)
            return len(self.tensors) - 1
        if isinstance(tree, Mapping):
            return {key: self._take(value) for key, value in tree.items()}
        if isinstance(tree, (tuple, list)):
            return type(tree)(self._take(value) for value in tree)
        raise LossError(
            f"encode returned {type(tree).__name__}: must be a tensor, or a dict, tuple or list of "
            "tensors"
        )

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        def put(tree: Any) -> Any:
            if isinstance(tree, int):
                return tensors[tree]
            if isinstance(tree, dict):
                return {key: put(value) for key, value in tree.items()}
            return type(tree)(put(value) for value in tree)

        return put(self._tree)

    def checked_like(self, other: _Leaves) -> list[Tensor]:
        if self._tree != other._tree:
            raise LossError(
                "encode returned another structure for another micro-batch: all must have the same "
                "keys and lengths"
            )
        return self.tensors


def _whole(parts: tuple[Tensor, ...]) -> Tensor:
    """One leaf over all micro-batches, apart from any graph; numbers become a vector."""
    joined = torch.cat(
        [part.detach().reshape(1) if part.dim() == 0 else part.detach() for part in parts]
    )
    return joined.requires_grad_(joined.is_floating_point())


def _rows(tensor: Tensor) -> int:
    return 1 if tensor.dim() == 0 else len(tensor)


def _modules(model: Any) -> list[nn.Module]:
    if isinstance(model, nn.Module):
        return [model]
    values = model.values() if isinstance(model, Mapping) else model
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        return []
    return [value for value in values if isinstance(value, nn.Module)]


def _distance(a: Tensor, b: Tensor) -> Tensor:
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    gap = (a.to(wide) - b.to(wide)).abs()
    return (
        (gap.amax() / b.to(wide).abs().amax().clamp_min(1e-30)).double()
        if gap.numel()
        else gap.sum().double()
    )


def _check_replay(farthest: Tensor, cached: Sequence[Tensor], coupled: Coupled) -> None:
    allowed = coupled.tolerance
    if allowed is None:
        # Some kernels add in another order each time: a few hundred roundings of the type.
        widest = [torch.finfo(leaf.dtype).eps for leaf in cached if leaf.is_floating_point()]
        allowed = 500 * max(widest)
    found = float(farthest)
    if not found <= allowed:
        raise WindowError(
            f"encode gave other representations the second time (relative difference {found:.1e}, "
            f"allowed {allowed:.1e}), so the gradient would be wrong. It must depend on the model, "
            "the micro-batch and the global random generators only; Coupled(tolerance=...) allows "
            "more"
        )
