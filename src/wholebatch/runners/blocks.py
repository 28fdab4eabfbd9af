"""Blocks that are computed again in the backward pass instead of being kept.

With all micro-batches alive at once, lock-step holds the activations of the whole batch. With
blocks it needs to hold only what goes into each, and the inside of the one that all are in: on a
ResNet-50 about a third, for about a third more time, and nothing travels to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wholebatch.coupled.moments import recomputing
from wholebatch.coupled.norms import batchnorms
from wholebatch.coupled.replaced import ReplacedForwards
from wholebatch.coupled.rng import Begins, Call
from wholebatch.splitting.structure import flatten

__all__ = ["BeginAgain", "Recomputed", "blocks_of"]

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


class BeginAgain(Exception):
    """The input of a block was changed in place, and no copy of it had been kept."""


class Recomputed:
    """While this is entered, the given blocks keep their inputs only.

    All but those that are `kept` whole: `worth_keeping` names some, once all micro-batches went
    through. `begins` is told where the blocks draw random numbers. With `again`, a context in which
    a call is computed again, the generators are left alone.

    A block is given again what it was given, a list as long as it was. Where its input is changed
    in place, by itself or later, `check` says so by `BeginAgain` and adds its name to `changing`:
    of these a copy of the input is kept.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[str, nn.Module]],
        *,
        kept: frozenset[str] = frozenset(),
        begins: Begins | None = None,
        again: Callable[[Call], AbstractContextManager[None]] | None = None,
        changing: set[str] | None = None,
    ) -> None:
        self._blocks = blocks
        self._changing = set() if changing is None else changing
        self._watched: list[tuple[str, Tensor, int]] | None = []
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

    def check(self) -> None:
        """Before the first backward: are the inputs that it will begin from as they were?"""
        watched, self._watched = self._watched or [], None
        found = {name for name, tensor, then in watched if _version(tensor) != then}
        if found:
            self._changing |= found
            raise BeginAgain

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
            given = _Given(found, args, kwargs, copies=name in self._changing)
            if self._watched is not None and name not in self._changing:
                self._watched += [(name, tensor, _version(tensor)) for tensor in given.tensors]
            if again is not None and begins is not None:
                call = begins.call(name)
                return checkpoint(
                    given,
                    *given.to_hold(),
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=lambda: (nullcontext(), again(call)),
                )
            with nullcontext() if begins is None or recomputing() else begins.noted(name):
                return checkpoint(given, *given.to_hold(), use_reentrant=False)

        return forward


class _Given:
    """A call of a block that can be made again with what it was given."""

    def __init__(self, block: Callable[..., Any], args: Any, kwargs: Any, *, copies: bool) -> None:
        self._block = block
        self._copies = copies
        leaves, structure = flatten((args, kwargs))
        values = [leaf.value for leaf in leaves]
        # Around containers of its own: what the caller puts into its own later is not given again.
        _, self._structure = flatten(structure.build(values))
        self._values = [None if isinstance(value, Tensor) else value for value in values]
        self._places = [at for at, value in enumerate(values) if isinstance(value, Tensor)]
        self.tensors: list[Tensor] = [values[at] for at in self._places]
        self._first: tuple[Any, Any] | None = (args, kwargs)

    def to_hold(self) -> list[Tensor]:
        """The tensors, or copies of them; this call itself holds them no longer."""
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
