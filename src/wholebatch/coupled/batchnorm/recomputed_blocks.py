"""Blocks that are recomputed in the backward pass instead of being kept.

Lock-step has all micro-batches alive at once, so it holds the activations of the whole batch. With
blocks it holds only their inputs, and the inside of the block that is being computed. A ResNet-50
needs about a third of the memory and a third more time, and nothing is copied to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wholebatch.core.splitting.samples import flatten
from wholebatch.coupled.batchnorm.whole_batch_norm import recomputing
from wholebatch.coupled.normalisation_layers import ReplacedForwards, batchnorms

_MOST_NORMS = 8
_SMALL = 0.05
"""The fraction of a model's activations that may be kept in blocks at its end."""


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the parts of a model that are worth recomputing as a whole, with their names.

    These are the largest modules with at most 8 BatchNorms, and at most half of all, that are not
    just a sequence of such modules: the bottlenecks of a ResNet, the layers of a DenseNet, the
    stages of a U-Net.

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


class BlockInputChanged(Exception):
    """Raised when a block's input was changed in place and no copy of it was kept."""


class RecomputedBlocks:
    """A context in which the given blocks keep only their inputs.

    Blocks in `kept` keep everything; `worth_keeping` names some after a run. Without `draws`, as in
    a run that is captured, blocks draw no random numbers, and the generators are left alone.

    A block is recomputed with its first arguments, even if a list among them has grown since. If a
    tensor among them was changed in place, by the block or later, `check` raises an error and adds
    the block's name to `changing`. For these blocks a copy of the input is kept.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[str, nn.Module]],
        *,
        kept: frozenset[str],
        changing: set[str],
        draws: bool,
    ) -> None:
        self._blocks = blocks
        self._kept = kept
        self._changing = changing
        self._draws = draws
        self._watched: list[tuple[str, Tensor, int]] | None = []
        self._calls: dict[str, int] = {}
        self._replaced = ReplacedForwards()

    def __enter__(self) -> RecomputedBlocks:
        for name, block in self._blocks:
            if name not in self._kept:
                self._replaced.replace(block, self._checkpointed(name, block.forward))
        return self

    def __exit__(self, *error: object) -> None:
        self._replaced.restore()

    def check(self) -> None:
        """Raise `BlockInputChanged` if one has; call before the first backward."""
        watched, self._watched = self._watched or [], None
        found = {name for name, tensor, then in watched if _version(tensor) != then}
        if found:
            self._changing |= found
            raise BlockInputChanged

    def worth_keeping(self, micro_batches: int, sizes: Mapping[str, int]) -> frozenset[str]:
        """Return the blocks at the end of the forward that are cheap to keep.

        The last block runs first in the backward, where it would be recomputed at once: keeping it
        costs nothing. Those before it are kept as long as the `sizes` of their layers stay small.
        """
        found: set[str] = set()
        left = _SMALL * sum(sizes.values())
        for name in reversed(self._calls):
            if self._calls[name] != micro_batches:
                break  # Called more than once, or not by every micro-batch.
            inside = sum(size for layer, size in sizes.items() if layer.startswith(f"{name}."))
            left -= inside if found else 0
            if left < 0:
                break
            found.add(name)
        return frozenset(found)

    def _checkpointed(self, name: str, found: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not recomputing():
                self._calls[name] = self._calls.get(name, 0) + 1
            given = _BlockCall(found, args, kwargs, copies=name in self._changing)
            if self._watched is not None and name not in self._changing:
                self._watched += [(name, tensor, _version(tensor)) for tensor in given.tensors]
            return checkpoint(
                given, *given.take_tensors(), use_reentrant=False, preserve_rng_state=self._draws
            )

        return forward


class _BlockCall:
    """A call of a block that can be repeated with the same arguments."""

    def __init__(self, block: Callable[..., Any], args: Any, kwargs: Any, *, copies: bool) -> None:
        self._block = block
        self._copies = copies
        leaves, structure = flatten((args, kwargs))
        values = [leaf.value for leaf in leaves]
        # Rebuild the containers: the caller may change its own later.
        _, self._structure = flatten(structure.build(values))
        self._values = [None if isinstance(value, Tensor) else value for value in values]
        self._places = [at for at, value in enumerate(values) if isinstance(value, Tensor)]
        self.tensors: list[Tensor] = [values[at] for at in self._places]
        self._first: tuple[Any, Any] | None = (args, kwargs)

    def take_tensors(self) -> list[Tensor]:
        """Return the tensors, or copies of them, and stop holding them here."""
        tensors, self.tensors = self.tensors, []
        return [self._copied(tensor) for tensor in tensors]

    def _copied(self, tensor: Tensor) -> Tensor:
        return tensor.clone() if self._copies else tensor

    def __call__(self, *tensors: Tensor) -> Any:
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
        else:
            values = list(self._values)
            for at, tensor in zip(self._places, tensors, strict=True):
                values[at] = self._copied(tensor)
            args, kwargs = self._structure.build(values)
        return self._block(*args, **kwargs)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
