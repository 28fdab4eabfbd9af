"""Code of the user's that works on gradients: once per window, on the whole gradient.

A hook on a parameter (`parameter.register_hook`) may clip, mask or add noise. For the undivided
batch it runs once, on the whole gradient; run on every micro-batch it would be another function
unless it is linear. So a window takes the hooks off, and runs them at its close. After them comes
`on_gradient=`, one function for all gradients, and then the clipping: the order of a plain loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from wholebatch.errors import OptionError, RankError

__all__ = ["DeferredHooks", "OnGradient", "check_same_norm"]

OnGradient: TypeAlias = Callable[[list[tuple[str, nn.Parameter]]], None]
"""Called with the names and parameters whose `.grad` is the whole gradient of the window."""


class DeferredHooks:
    """The hooks that were taken off the parameters of an open window, and `on_gradient`.

    `named()` gives the names and parameters that `on_gradient` is called with.
    """

    def __init__(
        self,
        on_gradient: OnGradient | None = None,
        named: Callable[[], list[tuple[str, nn.Parameter]]] = list,
    ) -> None:
        if on_gradient is not None and not callable(on_gradient):
            raise OptionError(
                f"on_gradient={on_gradient!r}: must be a function of a list of (name, parameter)"
            )
        self._on_gradient = on_gradient
        self._named = named
        self._taken: list[tuple[nn.Parameter, Mapping[int, Any]]] = []

    def __bool__(self) -> bool:
        return self.taken or self.calls

    @property
    def taken(self) -> bool:
        """True if a parameter of the window has hooks."""
        return bool(self._taken)

    @property
    def calls(self) -> bool:
        """True if there is an `on_gradient`."""
        return self._on_gradient is not None

    @torch.no_grad()
    def call(self) -> None:
        """Call `on_gradient` with the parameters that have a gradient."""
        assert self._on_gradient is not None
        self._on_gradient([(name, p) for name, p in self._named() if p.grad is not None])

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            hooks = parameter._backward_hooks
            if hooks:
                parameter._backward_hooks = None
                self._taken.append((parameter, hooks))

    def run(
        self, lent: Callable[[nn.Parameter], AbstractContextManager[None]] | None = None
    ) -> None:
        """Each hook in its order, on the complete normalised gradient, as autograd would.

        Within `lent(parameter)` a gradient that is kept elsewhere is in the parameter's `.grad`.
        """
        for parameter, hooks in self._taken:
            with nullcontext() if lent is None else lent(parameter):
                for hook in list(hooks.values()):
                    if parameter.grad is None:
                        break
                    replaced = hook(parameter.grad)
                    if replaced is not None:
                        parameter.grad = replaced

    def give_back(self) -> None:
        for parameter, hooks in self._taken:
            parameter._backward_hooks = hooks  # type: ignore[assignment]
        self._taken.clear()


def check_same_norm(norm: float, largest: Callable[[Tensor], Tensor], device: torch.device) -> None:
    """Refuse an `on_gradient` that has made other gradients here than on another rank."""
    norm = norm if math.isfinite(norm) else math.inf
    both = torch.tensor([norm, -norm], dtype=torch.float64, device=device)
    most, least = largest(both).tolist()
    if not math.isclose(most, -least, rel_tol=1e-6):
        raise RankError(
            f"on_gradient= has made gradients of norm {most:g} on one rank and {-least:g} on "
            "another, so their models would drift apart: it must do the same on every rank (draw "
            "noise from a torch.Generator with one seed for all)"
        )
