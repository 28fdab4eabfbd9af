"""The modules that a loop calls, and what they hold besides trained weights."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterator
from types import ModuleType

import torch
from torch import Tensor, nn

from wholebatch.coupled.normalisation_layers import batchnorms, uses_batch_statistics


class CalledModules:
    """Notes the outermost modules that are called, and which of their numbers move."""

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}
        self._inner: set[int] = set()
        self._with_gradients: set[int] = set()
        self._without_gradients: set[int] = set()
        self._beside: dict[int, nn.Module] = {}
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
        if is_first:
            self._beside = _modules_in_frames()
        held = dict(self._numbers(trained))
        changes = [
            (key[1], was, held[key])
            for key, was in self._held.items()
            if key in held and not held[key].equal(was)
        ]
        self._held = held
        weights = {id(p): p for module in self.modules.values() for p in module.parameters()}
        ours = [_few(weights[number]) for number in trained if changes and number in weights]
        self.is_averaged = any(
            was.shape == now.shape == weight.shape and _approaches(was, now, weight)
            for _, was, now in changes
            for weight in ours
        )
        if is_first or not changes:
            return ""
        return (
            f"{changes[0][0]} changes between two backwards of the window, so a micro-batch may "
            "depend on those before it"
        )

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
        """Yield a few numbers of what modules hold, but for trained weights.

        These are the modules that are called, and those in the loop's frames: a copy of the model
        may be an average of its weights.
        """
        for number, module in (self._beside | self.modules).items():
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


def _modules_in_frames() -> dict[int, nn.Module]:
    """Return the modules that are variables of the calling frames, or attributes of these."""
    modules = {}
    for frame, _ in traceback.walk_stack(None):
        for value in frame.f_locals.values():
            held = [] if isinstance(value, ModuleType) else getattr(value, "__dict__", {}).values()
            for candidate in (value, *held):
                if isinstance(candidate, nn.Module):
                    modules[id(candidate)] = candidate
    return modules
