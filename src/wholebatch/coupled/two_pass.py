"""Losses that couple samples, in two passes over the micro-batches.

The first pass encodes every micro-batch without an autograd graph. The loss of the whole batch is
computed from all representations, and differentiated with respect to them. The second pass encodes
every micro-batch again, with the same random numbers and with a graph, and backpropagates its part
of that gradient. By the chain rule this gives the gradient of the undivided batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.batch.samples import Structure, flatten
from wholebatch.distributed.process_group import Group
from wholebatch.errors import LossError, UnsupportedError, WindowError
from wholebatch.losses.coupled import Coupled
from wholebatch.losses.loss import Loss
from wholebatch.window.autograd_graph import version_of
from wholebatch.window.forward_state import capture_random, restore_random

_OWN_GRADIENT = (
    "encode calls torch.autograd.grad, and the first pass of wb.Coupled runs without gradients: "
    "put that part of encode into `with torch.enable_grad():`"
)


@dataclass(frozen=True)
class Representations:
    """The tensors that `encode` returned for one micro-batch, in order."""

    tensors: list[Tensor]
    names: tuple[tuple[str, bool], ...]
    """Of each leaf that `encode` returned: its name, and True if it is a tensor, not None."""
    structure: Structure
    """The containers that `encode` returned, without the tensors."""

    @classmethod
    def of(cls, encoded: Any) -> Representations:
        leaves, structure = flatten(encoded)
        values = [leaf.value for leaf in leaves]
        tensors = [
            torch.tensor(float(value)) if isinstance(value, int | float) else value
            for value in values
            if value is not None
        ]
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise LossError(
                    f"encode returned {type(tensor).__name__}: must be a tensor, or a dict, tuple "
                    "or list of tensors"
                )
        if not tensors:
            raise LossError("encode returned no tensor: return the representations of its samples")
        names = tuple((leaf.name, leaf.value is not None) for leaf in leaves)
        empty = flatten(structure.build([None] * len(leaves)))[1]
        return cls(tensors, names, empty)

    def detached(self) -> Representations:
        return replace(self, tensors=[tensor.detach() for tensor in self.tensors])

    def is_finite(self) -> Tensor:
        """Return True as a tensor if all values are finite, without waiting for the device."""
        checks = [tensor.isfinite().all() for tensor in self.tensors if tensor.is_floating_point()]
        if not checks:
            return torch.tensor(True)
        return torch.stack([check.to(checks[0].device) for check in checks]).all()


def encoding_loss(coupled: Coupled, model: Any, micro: Any) -> Loss:
    """Return a loss of one micro-batch that needs the memory of `encode`, to choose a size."""
    tensors = Representations.of(coupled.encode(model, micro)).tensors
    total = sum((t.float().square().sum() for t in tensors if t.requires_grad), torch.zeros(()))
    return Loss(total, 1)


class WholeRepresentations:
    """The tensors joined over all micro-batches, without their graphs; numbers become vectors."""

    def __init__(self, parts: list[Representations], trained: Sequence[bool]) -> None:
        """Join the parts and empty them on the way, so that representations are held once."""
        self._structure, self._names = parts[0].structure, parts[0].names
        for part in parts:
            if part.names != self._names:
                raise LossError(
                    "encode returned another structure for a second micro-batch: every "
                    "micro-batch must give the same keys and lengths"
                )
        self.tensors: list[Tensor] = []
        self._ends: list[list[int]] = []
        for place in range(len(parts[0].tensors)):
            rows = [_as_rows(part.tensors[place].detach()) for part in parts]
            for part in parts:
                part.tensors[place] = torch.empty(0)
            self._ends.append(list(accumulate(map(len, rows), initial=0)))
            whole = torch.cat(rows)
            del rows
            self.tensors.append(whole.requires_grad_(trained[place]))

    def for_loss(self, gather: Callable[[Tensor], Tensor]) -> Any:
        """Return the tensors in the structure of `encode`; `gather` adds the rows of all ranks."""
        tensors = map(gather, self.tensors)
        leaves = [next(tensors) if is_tensor else None for _, is_tensor in self._names]
        return self._structure.build(leaves)

    def distances(self, index: int, again: Representations) -> Iterator[Tensor]:
        """Yield the relative distance of each representation from that of the first pass."""
        if again.names != self._names:
            raise LossError("encode returned another structure the second time")
        for place, tensor in enumerate(again.tensors):
            if tensor.is_floating_point():
                first = self.tensors[place].detach()[self._slice(place, index)]
                yield _distance(_as_rows(tensor.detach()), first)

    def gradients(self, index: int, again: Representations) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors of this micro-batch that require gradients, and their gradients."""
        outputs: list[Tensor] = []
        gradients: list[Tensor] = []
        for place, tensor in enumerate(again.tensors):
            gradient = self.tensors[place].grad
            if gradient is not None and tensor.requires_grad:
                outputs.append(tensor)
                gradients.append(gradient[self._slice(place, index)].view_as(tensor))
        return outputs, gradients

    def _slice(self, place: int, index: int) -> slice:
        return slice(*self._ends[place][index : index + 2])


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Return `‖a - b‖ / ‖b‖`, or infinity if the shapes differ."""
    if a.shape != b.shape:
        return torch.tensor(float("inf"), dtype=torch.float64)
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    gap = torch.linalg.vector_norm(a.to(wide) - b.to(wide))
    size = torch.linalg.vector_norm(b.to(wide)).clamp_min(torch.finfo(wide).tiny)
    distance: Tensor = (gap / size).double()
    return distance


def gather_rows(tensor: Tensor, group: Group) -> Tensor:
    """Gather a tensor's rows from all ranks, in the order of the ranks, differentiably.

    Ranks may have different numbers of rows. The backward sums the gradients of all ranks for each
    row, so a loss that every rank computes must be divided by the number of ranks.
    """
    if group.ranks == 1:
        return tensor
    counts = [0.0] * group.ranks
    counts[group.rank] = float(len(tensor))
    sizes = [int(size) for size in group.sum(counts)]
    wide = tensor.to(torch.int64) if tensor.dtype is torch.bool else tensor
    others = sum(sizes[: group.rank]), sum(sizes[group.rank + 1 :])
    before, after = (wide.new_zeros((number, *wide.shape[1:])) for number in others)
    whole = torch.cat([before, wide, after])  # The sum with zeros is exact.
    if not tensor.is_floating_point():
        return group.sum_tensor(whole).to(tensor.dtype)
    gathered: Tensor = _SumOverRanks.apply(whole, group.sum_tensor)  # type: ignore[no-untyped-call]
    return gathered


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, summed: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.summed = summed
        return summed(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.summed(gradient.contiguous()), None


@dataclass(eq=False)
class TwoPasses:
    """The two passes over the micro-batches of one window.

    `encode(micro)` returns the representations of a micro-batch. The last `keep` of them keep their
    graphs from the first pass and are not encoded again; if the forward changes buffers of
    `modules`, only a batch that is not split keeps its graph. Buffers and random generators end as
    after one pass.
    """

    micros: Sequence[Any]
    encode: Callable[[Any], Any]
    _: KW_ONLY
    modules: Sequence[nn.Module]
    keep: int = 0
    kept: dict[int, Representations] = field(default_factory=dict, init=False)
    finite: list[Tensor] = field(default_factory=list, init=False)
    """For each micro-batch, a flag on the device: True if its representations are finite."""

    def __post_init__(self) -> None:
        self._saved = [(b, version_of(b), b.detach().clone()) for b in self._buffers()]
        self._changes_buffers = False
        self._starts: list[dict[str, Any]] = []

    def first(self) -> WholeRepresentations:
        """Encode every micro-batch, without a graph if it is not kept; restore the buffers."""
        parts: list[Representations] = []
        for index, micro in enumerate(self.micros):
            self._starts.append(capture_random())
            keeps = index >= len(self.micros) - self.keep
            if keeps and not self.kept:
                torch.clear_autocast_cache()  # Casts made without a graph pass no gradient back.
            try:
                # The first one shows which representations depend on the model. The others are
                # data, which a loss may count: its units must not require a gradient.
                with torch.set_grad_enabled(keeps or index == 0):
                    encoded = Representations.of(self.encode(micro))
                if index == 0:
                    trained = [tensor.requires_grad for tensor in encoded.tensors]
            except RuntimeError as error:
                if "does not require grad" in str(error):
                    raise UnsupportedError(_OWN_GRADIENT) from error
                raise
            if keeps:
                self.kept[index] = encoded
            parts.append(encoded.detached())
            del encoded
            if index == 0 and not keeps:
                torch.clear_autocast_cache()
        with torch.no_grad():
            self.finite = [part.is_finite() for part in parts]
            whole = WholeRepresentations(parts, trained)
        if len(self.micros) > 1 or not self.kept:
            self._changes_buffers = self._put_buffers_back()
        if self._changes_buffers:  # The second pass must change them, so it encodes everything.
            self.kept.clear()
        return whole

    def second(
        self,
        whole: WholeRepresentations,
        inject: Callable[[int, list[Tensor], list[Tensor]], None],
        tolerance: float | None = None,
    ) -> None:
        """Encode every micro-batch again, and backpropagate the gradient of its representations.

        `inject(index, outputs, gradients)` runs the backward of a micro-batch.
        """
        after = capture_random()
        farthest: list[Tensor] = []
        # Go from the last to the first. The kept graphs then come first and free their memory for
        # the others, and the order of addition (so every bit) does not depend on how many were
        # kept.
        order = range(len(self.micros))
        for index in order if self._changes_buffers else reversed(order):
            encoded = self.kept.pop(index, None)
            if encoded is None:
                restore_random(self._starts[index])
                encoded = Representations.of(self.encode(self.micros[index]))
            farthest.extend(whole.distances(index, encoded))
            inject(index, *whole.gradients(index, encoded))
            del encoded  # its graph, before that of the next
        restore_random(after)
        if farthest:
            worst = float(
                torch.stack([distance.to(farthest[0].device) for distance in farthest]).max()
            )
            # A NaN distance is expected if a representation was not finite: the close reports that.
            if not math.isnan(worst) or all(self.finite):
                _check_replay(worst, [tensor.dtype for tensor in whole.tensors], tolerance)

    def _buffers(self) -> list[Tensor]:
        return [buffer for module in self.modules for buffer in module.buffers()]

    @torch.no_grad()
    def _put_buffers_back(self) -> bool:
        """Restore the buffers of before the first pass; return True if any had changed."""
        moved = [saved for saved in self._saved if version_of(saved[0]) != saved[1]]
        for buffer, _, before in moved:
            buffer.copy_(before)
        return bool(moved) or [id(b) for b in self._buffers()] != [id(b) for b, *_ in self._saved]


def _check_replay(distance: float, dtypes: Iterable[torch.dtype], allowed: float | None) -> None:
    """Refuse representations that differ between the passes by more than rounding."""
    if allowed is None:
        # Some kernels add in a different order each time: allow 500 rounding steps of the dtype.
        # Allow 8 in 16-bit dtypes, where hundreds of steps would be as large as the number itself.
        allowed = max(
            torch.finfo(dtype).eps * (8 if torch.finfo(dtype).bits <= 16 else 500)
            for dtype in dtypes
            if dtype.is_floating_point
        )
    if not distance <= allowed:
        raise WindowError(
            "encode returned different representations the second time (relative difference "
            f"{distance:.1e}, allowed {allowed:.1e}), so the gradient would be wrong. It must "
            "depend on the model, the micro-batch and the global random generators only; "
            "Coupled(tolerance=...) allows more"
        )
