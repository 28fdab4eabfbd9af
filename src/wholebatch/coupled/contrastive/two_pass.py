"""Losses that couple samples, in two passes over the micro-batches.

The first pass encodes every micro-batch without an autograd graph. The loss of the whole batch is
computed from all representations, and differentiated with respect to them. The second pass encodes
every micro-batch again, with the same random numbers and with a graph, and backpropagates its part
of that gradient. By the chain rule this gives the gradient of the undivided batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from wholebatch.core import random_state
from wholebatch.core.loss import Loss, Terms, as_loss
from wholebatch.coupled.contrastive.encoded import Leaves, Tree
from wholebatch.coupled.contrastive.losses import Coupled
from wholebatch.errors import WindowError

__all__ = ["Each", "run_two_pass"]

Inject: TypeAlias = Callable[[int, list[Tensor], list[Tensor]], None]
Whole: TypeAlias = Callable[[Loss | Terms, list[Tensor]], None]
Each: TypeAlias = Callable[
    [Sequence[tuple[int, Any]], Callable[[tuple[int, Any]], Any], Callable[[Any], Any]], list[Any]
]
"""A function that runs `backward(forward(item))` for every item and returns the results."""


def run_two_pass(
    coupled: Coupled,
    model: Any,
    micros: Sequence[Any],
    *,
    whole: Whole,
    inject: Inject,
    modules: Iterable[nn.Module],
    moved: Callable[[Any], Any] = lambda micro: micro,
    sampling: Callable[[Any], AbstractContextManager[Any]] = lambda micro: nullcontext(),
    computing: Callable[[], AbstractContextManager[Any]] = nullcontext,
    between: Callable[[], None] = lambda: None,
    before_micro: Callable[[int], None] = lambda index: None,
    each: Each | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
    keep: int = 0,
    weighing: Callable[[int], AbstractContextManager[Any]] = lambda samples: nullcontext(),
) -> list[Tensor]:
    """Add the gradient of `coupled.loss` over all `micros` into the parameters.

    - `whole(loss, leaves)` is called once with the loss of the whole batch. It runs the backward
      into the leaves, and chooses the scale.
    - `inject(index, outputs, gradients)` runs the backward of a micro-batch. The gradients already
      contain the scale.
    - Both passes call `moved(micro)`, and encode within `computing()` and `sampling(micro)`. The
      loss also runs within `computing()`, and each backward within `sampling(micro)`.
    - `between` is called after the first pass, once the buffers of `modules` are restored.
    - `before_micro(index)` is called before each micro-batch of either pass.
    - `gather` returns the rows of all ranks, differentiably.
    - `each` runs the micro-batches of a pass; by default, one after the other.
    - The last `keep` micro-batches keep their graphs from the first pass and are not encoded again,
      unless the forward changes buffers.
    - `weighing(samples)` wraps each encoding of the second pass.

    Buffers and random generators end as after one pass. Returns, for each micro-batch, a flag on
    the device: True if its representations were finite.
    """
    numbered = list(enumerate(micros))
    alone = each is None
    run = _one_by_one if each is None else each
    buffers = _Buffers(modules)
    starts: dict[int, dict[str, Any]] = {}
    kept: dict[int, Tree] = {}

    def first(item: tuple[int, Any]) -> Tree:
        index, micro = item
        before_micro(index)
        starts[index] = random_state.capture()
        keeps = alone and index >= len(micros) - keep
        if keeps and not kept:
            torch.clear_autocast_cache()  # Casts made without a graph pass no gradient back.
        with sampling(micro), computing(), torch.set_grad_enabled(keeps):
            tree = Tree.of(coupled.encode(model, moved(micro)))
        if keeps:
            kept[index] = tree
        return tree.detached()

    start = random_state.capture()
    with torch.no_grad():
        trees = run(numbered, first, lambda tree: tree)
        finite = [tree.is_finite() for tree in trees]
        whole_batch = Leaves.of(trees)
        del trees
    moves = buffers.put_back()
    if moves:  # The second pass must change the buffers, so it encodes every micro-batch.
        kept.clear()
    between()
    try:
        _whole_loss(coupled, whole_batch, whole=whole, computing=computing, gather=gather)
    except torch.OutOfMemoryError as error:
        if kept:
            raise
        # Smaller micro-batches would not help: do not raise an out-of-memory error.
        raise WindowError(
            f"the loss of the whole batch ran out of memory ({str(error).splitlines()[0]}): it "
            f"holds the representations of all {len(whole_batch.tensors[0])} samples and what it "
            "computes from them; compute it in fewer rows at a time (the ready losses have rows=), "
            "or make the representations or the batch smaller"
        ) from None
    after = random_state.capture()
    farthest: list[Tensor] = []

    def again(item: tuple[int, Any]) -> tuple[int, Tree]:
        index, micro = item
        before_micro(index)
        if index in kept:
            return index, kept.pop(index)
        if alone:  # In lock-step, each micro-batch has its own stream, restarted below.
            random_state.restore(starts[index])
        with sampling(micro), computing(), weighing(whole_batch.rows(index)):
            return index, Tree.of(coupled.encode(model, moved(micro)))

    def through(encoded: tuple[int, Tree]) -> None:
        index, tree = encoded
        farthest.extend(whole_batch.distances(index, tree))
        outputs, gradients = whole_batch.gradients(index, tree)
        with sampling(micros[index]):  # A checkpointed block draws its masks again.
            inject(index, outputs, gradients)

    if not alone:
        random_state.restore(start)
    # Go from the last to the first. The kept graphs then come first and free their memory for the
    # others, and the order of addition (so every bit) does not depend on how many were kept.
    run(numbered[::-1] if alone and not moves else numbered, again, through)
    random_state.restore(after)
    if farthest:
        worst = float(torch.stack([found.to(farthest[0].device) for found in farthest]).max())
        # A NaN distance is expected if a representation was not finite: the close reports that.
        if not math.isnan(worst) or all(finite):
            _check_replay(worst, whole_batch.dtypes, coupled)
    return finite


def _one_by_one(
    items: Sequence[tuple[int, Any]],
    forward: Callable[[tuple[int, Any]], Any],
    backward: Callable[[Any], Any],
) -> list[Any]:
    return [backward(forward(item)) for item in items]


def _whole_loss(
    coupled: Coupled,
    whole_batch: Leaves,
    *,
    whole: Whole,
    computing: Callable[[], AbstractContextManager[Any]],
    gather: Callable[[Tensor], Tensor] | None,
) -> None:
    """Compute the loss of the whole batch and run its backward into the representations."""
    leaves = whole_batch.tensors
    with computing():
        given = leaves if gather is None else [gather(leaf) for leaf in leaves]
        loss = as_loss(coupled.loss(whole_batch.tree.rebuilt(given)))
    whole(loss, [leaf for leaf in leaves if leaf.requires_grad])


class _Buffers:
    """A copy of the modules' buffers, taken before the first pass."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._saved = [(b, b._version, b.detach().clone()) for b in self._now()]

    def _now(self) -> list[Tensor]:
        return [buffer for module in self._modules for buffer in module.buffers()]

    @torch.no_grad()
    def put_back(self) -> bool:
        """Restore the buffers; return True if any had changed."""
        moved = [one for one in self._saved if one[0]._version != one[1]]
        for buffer, _, before in moved:
            buffer.copy_(before)
        return bool(moved) or [id(b) for b in self._now()] != [id(b) for b, _, _ in self._saved]


def _check_replay(found: float, dtypes: Iterable[torch.dtype], coupled: Coupled) -> None:
    allowed = coupled.tolerance
    if allowed is None:
        # Some kernels add in a different order each time: allow 500 rounding steps of the dtype.
        # Allow 8 in 16-bit dtypes, where hundreds of steps would be as large as the number itself.
        allowed = max(
            torch.finfo(dtype).eps * (8 if torch.finfo(dtype).bits <= 16 else 500)
            for dtype in dtypes
            if dtype.is_floating_point
        )
    if not found <= allowed:
        raise WindowError(
            f"encode gave other representations the second time (relative difference {found:.1e}, "
            f"allowed {allowed:.1e}), so the gradient would be wrong. It must depend on the model, "
            "the micro-batch and the global random generators only; Coupled(tolerance=...) allows "
            "more"
        )
