"""The modules that a loop calls, what they hold besides trained weights, and averages of these."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from wholebatch.coupled.normalisation_layers import batchnorms, uses_batch_statistics

_MOST_FOLLOWED = 4
"""Trained weights whose averages are looked for: the largest ones."""


class CalledModules:
    """Notes the outermost modules that are called, and which of their numbers move."""

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}
        self._inner: set[int] = set()
        self._with_gradients: set[int] = set()
        self._without_gradients: set[int] = set()
        self._windows = 0
        self._copies: list[tuple[weakref.ref[Tensor], Tensor]] = []
        """Tensors of a weight's shape, such as its average, and a few of their numbers."""
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

    def moved(self, *, is_first: bool, trained: Collection[int]) -> str:
        """Return what has moved since the last backward; `trained` are ids of weights.

        A micro-batch that `is_first` in its window depends on none before it.
        """
        weights = {id(p): p for module in self.modules.values() for p in module.parameters()}
        ours = [p for number, p in weights.items() if number in trained and type(p) is nn.Parameter]
        own = {id(tensor) for p in ours for tensor in (p, p.grad)}
        ours = sorted(ours, key=Tensor.numel)[-_MOST_FOLLOWED:]
        self._windows += is_first
        copies = list(self._moved_copies())
        self.is_averaged = any(
            _approaches(was, now, _few(weight))
            for copy, was, now in copies
            for weight in ours
            if weight.shape == copy.shape
        )
        if is_first and self._windows.bit_count() == 1:  # the windows 1, 2, 4, 8, ...
            self._copies = list(_tensors_like(ours, own))
        held = dict(self._numbers(trained))
        changes = [k[1] for k, was in self._held.items() if k in held and not held[k].equal(was)]
        changes += ["a copy of a weight" for copy, *_ in copies if isinstance(copy, nn.Parameter)]
        self._held = held
        if is_first or not changes:
            return ""
        return (
            f"{changes[0]} changes between two backwards of the window, so a micro-batch may "
            "depend on those before it"
        )

    def _moved_copies(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the copies that have moved since the last backward, with their numbers."""
        followed = [(copy, was) for ref, was in self._copies if (copy := ref()) is not None]
        self._copies = [(weakref.ref(copy), _few(copy)) for copy, _ in followed]
        for (copy, was), (_, now) in zip(followed, self._copies, strict=True):
            if not now.equal(was):
                yield copy, was, now

    def evaluated(self) -> str:
        """Return a doubt if a model is also called without gradients; the calls are forgotten."""
        is_evaluated = bool(self._without_gradients & self._with_gradients)
        self._with_gradients.clear()
        self._without_gradients.clear()
        if not is_evaluated:
            return ""
        return (
            "the model is also called without gradients before every backward, so the loss may use "
            "a statistic of one micro-batch"
        )

    @torch.no_grad()
    def _numbers(self, trained: Collection[int]) -> Iterator[tuple[tuple[int, str], Tensor]]:
        """Yield a few numbers of what the called modules hold, but for trained weights."""
        for number, module in self.modules.items():
            for name, part in module.named_modules():
                held: list[tuple[str, Tensor]] = [*part.named_parameters(recurse=False)]
                if not hasattr(part, "running_mean"):
                    held += part.named_buffers(recurse=False)
                for own, tensor in held:
                    if tensor.is_floating_point() and id(tensor) not in trained:
                        yield (number, f"{name}.{own}".lstrip(".")), _few(tensor)


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


def _tensors_like(
    weights: Sequence[Tensor], own: Collection[int]
) -> Iterator[tuple[weakref.ref[Tensor], Tensor]]:
    """Yield the tensors of a weight's shape, but for `own`, wherever the program holds them."""
    shapes = {weight.shape for weight in weights}
    for value in gc.get_objects() if shapes else ():
        if type(value) in (Tensor, nn.Parameter) and value.shape in shapes:
            is_plain = value.is_floating_point() and value.device.type in ("cpu", "cuda")
            if is_plain and id(value) not in own and value.untyped_storage().nbytes():
                yield weakref.ref(value), _few(value)
