"""Blocks that are computed again in the backward pass instead of being kept.

With all micro-batches alive at once, lock-step holds the activations of the whole batch. With
blocks it needs to hold only what goes into each, and the inside of the one that all are in: on a
ResNet-50 about a third, for about a third more time, and nothing travels to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from wholebatch.coupled.audit import batchnorms
from wholebatch.coupled.moments import recomputing
from wholebatch.coupled.replaced import ReplacedForwards
from wholebatch.coupled.rng import Begins, Call

__all__ = ["Recomputed", "blocks_of"]

_MOST_NORMS = 8
_SMALL = 0.05
"""The part of a model's activations that is kept in blocks at its end."""


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The parts of a model that are worth computing again as a whole, with their names.

    These are the largest modules with up to 8 BatchNorms, and not more than half of all, that are
    not a mere sequence of such: the bottlenecks of a ResNet, the layers of a DenseNet, the stages
    of a U-Net.

    >>> layer = lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    >>> [name for name, _ in blocks_of(nn.Sequential(layer(), layer(), nn.Linear(4, 2)))]
    ['0', '1']
    """
    found: list[tuple[str, nn.Module]] = []
    most = min(_MOST_NORMS, max(1, len(batchnorms(model)) // 2))

    def look(name: str, module: nn.Module) -> None:
        norms = batchnorms(module)
        if not norms or norms[0][1] is module:
            return
        composite = [
            child for child in module.children() if batchnorms(child) and any(child.children())
        ]
        sequence = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
        whole = not (sequence and len(composite) > 1) and len(norms) <= most
        if name and whole and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            found.append((name, module))
            return
        for child_name, child in module.named_children():
            look(f"{name}.{child_name}" if name else child_name, child)

    look("", model)
    return found


class Recomputed:
    """While this is entered, the given blocks keep their inputs only.

    All but those that are `kept` whole: `worth_keeping` names some, once all micro-batches went
    through. `begins` is told where the blocks draw random numbers. With `again`, a context in which
    a call is computed again, the generators are left alone.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[str, nn.Module]],
        *,
        kept: frozenset[str] = frozenset(),
        begins: Begins | None = None,
        again: Callable[[Call], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._blocks = blocks
        self._kept = kept
        self._begins = begins
        self._at_replay = again
        self._calls: dict[str, int] = {}
        self._replaced = ReplacedForwards()

    def __enter__(self) -> Recomputed:
        for name, block in self._blocks:
            if name not in self._kept:
                self._replaced.replace(block, self._again(name, block.forward))
        return self

    def __exit__(self, *error: object) -> None:
        self._replaced.restore()

    def worth_keeping(self, micro_batches: int, sizes: Mapping[str, int]) -> frozenset[str]:
        """Blocks at the end of the forward that cost little to keep, by the sizes of their layers.

        The last one comes first in the backward, when what is inside of it would be there again at
        once: it costs nothing. Those before it are kept as long as they are small together.
        """
        found: set[str] = set()
        left = _SMALL * sum(sizes.values())
        for name in reversed(self._calls):
            if self._calls[name] != micro_batches:
                break  # called more than once, or not by all
            inside = sum(size for layer, size in sizes.items() if layer.startswith(f"{name}."))
            left -= inside if found else 0
            if left < 0:
                break
            found.add(name)
        return frozenset(found)

    def _again(self, name: str, found: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not recomputing():
                self._calls[name] = self._calls.get(name, 0) + 1
            again, begins = self._at_replay, self._begins
            if again is not None and begins is not None:
                call = begins.call(name)
                return checkpoint(
                    found,
                    *args,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=lambda: (nullcontext(), again(call)),
                    **kwargs,
                )
            with nullcontext() if begins is None or recomputing() else begins.noted(name):
                return checkpoint(found, *args, use_reentrant=False, **kwargs)

        return forward
