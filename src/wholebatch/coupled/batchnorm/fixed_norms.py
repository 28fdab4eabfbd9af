"""BatchNorms that couple nothing for a while, so that what else couples samples can be seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from wholebatch.coupled.batchnorm.moments import Merged, merge, moments, normalise
from wholebatch.coupled.replaced_forwards import ReplacedForwards

__all__ = ["PLAIN", "FixedNorms", "InsideNorm", "given_to"]

PLAIN = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
"""Forwards of which all is known: what a BatchNorm does, and nothing else."""


class FixedNorms:
    """Within it, `norms` normalise every batch with the statistics of the first one they are given.

    That is what training does, but for samples acting on each other: behind a BatchNorm every
    sample moves when one is changed, and nothing that couples them could be told from it any more.
    `begin()` says that another run of the model begins. Running statistics stay.
    """

    def __init__(self, norms: Sequence[tuple[str, nn.Module]]) -> None:
        self._norms = norms
        self._first: dict[str, list[Merged]] = {}
        self._calls: dict[str, int] = {}
        self._replaced = ReplacedForwards()

    def __enter__(self) -> FixedNorms:
        for name, module in self._norms:
            self._replaced.replace(module, self._fixed(name, module, module.forward))
        return self

    def __exit__(self, *error: object) -> None:
        self._replaced.restore()

    def begin(self) -> None:
        self._calls.clear()

    def norm(self, name: str, x: Tensor, weight: Any, bias: Any, eps: float) -> Tensor:
        call = self._calls[name] = self._calls.get(name, -1) + 1
        first = self._first.setdefault(name, [])
        if call >= len(first):
            first.append(merge([moments(x.detach())]))
        return normalise(x, weight, bias, first[min(call, len(first) - 1)], eps)

    def _fixed(self, name: str, module: nn.Module, found: Callable[..., Any]) -> Callable[..., Any]:
        plain = type(module).forward in PLAIN and getattr(found, "__func__", None) in PLAIN

        def forward(*args: Any, **kwargs: Any) -> Any:
            if plain:
                assert isinstance(module, _BatchNorm)
                x = given_to(args, kwargs)
                return self.norm(name, x, module.weight, module.bias, module.eps)
            with InsideNorm(
                lambda x, running, weight, bias, momentum, eps: self.norm(
                    name, x, weight, bias, eps
                )
            ):
                return found(*args, **kwargs)

        return forward


def given_to(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """The tensor that a normalisation layer was called with, by position or by name."""
    given: Tensor = args[0] if args else next(iter(kwargs.values()))
    return given


Normed = Callable[
    [Tensor, "tuple[Tensor | None, Tensor | None]", "Tensor | None", "Tensor | None", float, float],
    Tensor,
]
"""Of the input, the running statistics, weight, bias, momentum and eps."""


class InsideNorm(TorchFunctionMode):
    """Puts `normed` where a layer with a forward of its own calls F.batch_norm.

    Calls that use the running statistics stay as they are.
    """

    def __init__(self, normed: Normed) -> None:
        super().__init__()
        self._normed = normed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, eps=eps)
        return self._normed(input, (running_mean, running_var), weight, bias, momentum, eps)
