"""The modules that a loop calls, what they hold besides trained weights, and averages of these."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from wholebatch.coupled.normalisation_layers import batchnorms, uses_batch_statistics

_MOST_FOLLOWED = 8
"""Averages of weights that are followed: the first ones that are written."""


Written = dict[int, tuple["weakref.ref[Tensor]", "weakref.ref[Tensor]"]]
"""Tensors that a loop has written with a weight, and that weight (`LoopCalls.written`)."""


class CalledModules:
    """Notes the outermost modules that are called, and which of their numbers move."""

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}
        self._inner: set[int] = set()
        self._with_gradients: set[int] = set()
        self._without_gradients: set[int] = set()
        self._written: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        """Tensors that the loop writes with a weight, and a few of their numbers."""
        self._held: dict[tuple[int, str], Tensor] = {}
        self.is_averaged = False
        """True if an average of the weights has moved since the last backward."""

    def enter(self, module: nn.Module) -> None:
        """Note a module that is called, and if that is without gradients."""
        number = id(module)
        if number in self._inner:
            return
        if number not in self.modules:
            self.modules[number] = module
            self._inner |= {id(inner) for inner in module.modules()} - {number}
        if torch.is_grad_enabled():
            self._with_gradients.add(number)
        elif module.training:
            self._without_gradients.add(number)

    def batchnorms(self) -> tuple[str, ...]:
        """Return the names of BatchNorms that train, in the modules called with gradients."""
        called = [m for n, m in self.modules.items() if n in self._with_gradients]
        named = [pair for module in called for pair in batchnorms(module)]
        return tuple(n for n, m in named if m.training and uses_batch_statistics(m))

    def changed(self, *, is_first: bool, trained: Collection[int], written: Written) -> bool:
        """True if what they hold has changed since the last backward, but for weights.

        A micro-batch that `is_first` in its window depends on none before it.
        """
        moves = list(self._moves(written))
        self.is_averaged = any(_approaches(was, now, _few(weight)) for _, weight, was, now in moves)
        held = dict(self._numbers(trained))
        changes = any(k in held and not held[k].equal(was) for k, was in self._held.items())
        changes |= any(isinstance(copy, nn.Parameter) for copy, *_ in moves)
        self._held = held
        return changes and not is_first

    def _moves(self, written: Written) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield what was written and has moved, the weight, and the numbers before and after."""
        for number, (ref, weight_ref) in list(written.items()):
            copy, weight = ref(), weight_ref()
            before = self._written.get(number, (None, None))
            if copy is None or weight is None:
                del written[number]
            elif before[0] is not None and before[0]() is copy:
                was, now = before[1], _few(copy)
                self._written[number] = (ref, now)
                if was is not None and not now.equal(was):
                    yield copy, weight, was, now
            elif len(self._written) < _MOST_FOLLOWED:
                self._written[number] = (ref, _few(copy))

    def evaluated(self) -> bool:
        """True if a model is called without gradients, too; the calls are forgotten."""
        is_evaluated = bool(self._without_gradients & self._with_gradients)
        self._with_gradients.clear()
        self._without_gradients.clear()
        return is_evaluated

    @torch.no_grad()
    def _numbers(self, trained: Collection[int]) -> Iterator[tuple[tuple[int, str], Tensor]]:
        """Yield a few numbers of what the called modules hold, but for trained weights."""
        for part in {part for module in self.modules.values() for part in module.modules()}:
            held: list[tuple[str, Tensor]] = [*part.named_parameters(recurse=False)]
            if not hasattr(part, "running_mean"):
                held += part.named_buffers(recurse=False)
            for name, tensor in held:
                if tensor.is_floating_point() and id(tensor) not in trained:
                    yield (id(part), name), _few(tensor)


def _few(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // 16)].cpu().clone()


def _approaches(was: Tensor, now: Tensor, weight: Tensor) -> bool:
    """True if numbers move straight towards weights, as a moving average of them does.

    A copy of the weights arrives there at once: it is no average.
    """
    change, way = (now - was).double(), (weight - was).double()
    factor = float(change @ way / (way @ way).clamp_min(1e-30))
    is_straight = float((change - factor * way).norm()) <= 1e-2 * float(change.norm())
    return len(change) > 3 and 0 < factor < 1 - 1e-3 and is_straight
