"""Random numbers in the forward, switched off or held still, so that other causes can be seen.

Dropout draws its masks for the batch that it is given, so the undivided batch and its micro-batches
get different ones, rightly: both are samples of the same thing. It is switched off for a proof.

Other draws of a loss are held. A draw has the shape of the batch that the loss is given, so the
undivided batch and its micro-batches get other numbers. Held, a draw gives the same row for every
sample: it then depends neither on the division nor on the order of the samples.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._python_dispatch import TorchDispatchMode

from wholebatch.coupled import Coupled
from wholebatch.coupled.sample_runs import HeldDraws
from wholebatch.window.forward_state import capture_random, restore_random


@dataclass
class Draws:
    """The draws of a loss: where they are made, and how they are held."""

    places: dict[str, None] = field(default_factory=dict)
    """`operation (file:line)` of every draw that was seen, in their order."""
    escaped: bool = False
    """Draws were made outside the loss: a checkpointed block draws again in the backward."""
    holds: list[_Hold] = field(default_factory=list)

    def holding(self, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return the loss with its draws held."""
        if isinstance(loss, Coupled):
            return replace(loss, encode=self._around(loss.encode), loss=self._around(loss.loss))
        return self._around(loss)

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        hold = _Hold(self.places)
        self.holds.append(hold)

        def held(*args: Any) -> Any:
            before = capture_random(every=False)
            is_first, hold.is_new, hold.is_open = hold.is_new, False, True
            try:
                with hold.recording() if is_first else hold.serving():
                    return function(*args)
            finally:
                hold.is_open = False
                restore_random(before)

        return held

    @property
    def steady(self) -> bool:
        """Tell if every call made the same draws, so that holding them has held everything."""
        return not self.escaped and all(hold.held for hold in self.holds)

    def watching(self) -> TorchDispatchMode:
        """Return a mode that notices draws made outside the loss, while it is entered."""
        return _Outside(self)

    def __str__(self) -> str:
        places = list(self.places)
        return ", ".join(places[:3]) + (f" and {len(places) - 3} more" if places[3:] else "")


class _Hold(HeldDraws):
    """Gives every draw the numbers that it gave at first, and notes where it was made."""

    def __init__(self, places: dict[str, None]) -> None:
        super().__init__()
        self.places, self.is_new, self.is_open = places, True, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            name = func.overloadpacket.__name__
            self.places[f"{name} ({_line()})"] = None
            if name == "randperm":  # it couples the samples, also held: not as the identity
                return func(*args, **(kwargs or {})).sort(descending=True).values
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _hold(self, name: str, made: Tensor) -> bool:
        if self._records and made.dim() and made.numel() and not made[:1].any():
            made.copy_(made.amax(0, keepdim=True).expand_as(made))  # not a mask that hides all
        return super()._hold(name, made)


class _Outside(TorchDispatchMode):
    """Notices draws that no `_Hold` has seen."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draws.escaped |= not any(hold.is_open for hold in self._draws.holds)
        return func(*args, **(kwargs or {}))


def _line() -> str:
    """Return the innermost line that is neither torch's nor ours."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    if frame is None:
        return "torch"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def dropouts(model: nn.Module) -> list[str]:
    """Return the names of the modules that drop something now."""
    return [name for name, module in model.named_modules() if _drops(module)]


def _drops(module: nn.Module) -> bool:
    if not module.training:
        return False
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return float(module.dropout) > 0
    return False


def _no_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.training = False
            module.p = 0.0  # a loop may call model.train() again
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0


def _evaluating(model: nn.Module) -> None:
    """Set evaluation mode but for normalisations: functional dropout asks `self.training`."""
    for module in model.modules():
        if not isinstance(module, _BatchNorm | _InstanceNorm):
            module.training = False


SILENCES: tuple[Callable[[nn.Module], None], ...] = (_no_dropout, _evaluating)
"""Ways to switch randomness off, the gentlest first; each includes the ones before it."""
