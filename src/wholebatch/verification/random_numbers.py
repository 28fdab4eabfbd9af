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

from wholebatch.core.forward_state import capture_random, restore_random
from wholebatch.coupled import Coupled

# Dropout and the like are not among them: their output is no number drawn but an input changed.
_HELD = frozenset(
    {"bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal"}
    | {"normal_", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like"}
    | {"random_", "uniform", "uniform_"}
)


@dataclass
class Draws:
    """The draws of a loss: where they are made, and how they are held."""

    places: dict[str, None] = field(default_factory=dict)
    """`operation (file:line)` of every draw that was seen, in their order."""
    escaped: bool = False
    """Draws were made outside the loss: a checkpointed block draws again in the backward."""
    records: list[_Record] = field(default_factory=list)

    def holding(self, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return the loss with its draws held."""
        if isinstance(loss, Coupled):
            return replace(loss, encode=self._around(loss.encode), loss=self._around(loss.loss))
        return self._around(loss)

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        record = _Record(self.places)
        self.records.append(record)

        def held(*args: Any) -> Any:
            record.is_open = True
            try:
                with _Hold(record) as hold:
                    returned = function(*args)
            finally:
                record.is_open = False
            record.counts.add(hold.count)
            return returned

        return held

    @property
    def steady(self) -> bool:
        """Tell if every call made the same draws, so that holding them has held everything."""
        return not self.escaped and all(
            not record.other_shapes and len(record.counts) <= 1 for record in self.records
        )

    def watching(self) -> TorchDispatchMode:
        """Return a mode that notices draws made outside the loss, while it is entered."""
        return _Outside(self)

    def __str__(self) -> str:
        places = list(self.places)
        return ", ".join(places[:3]) + (f" and {len(places) - 3} more" if places[3:] else "")


@dataclass
class _Record:
    """The first values of one function's draws, by their number within a call."""

    places: dict[str, None]
    rows: dict[int, Tensor] = field(default_factory=dict)
    counts: set[int] = field(default_factory=set)
    other_shapes: bool = False
    is_open: bool = False


class _Hold(TorchDispatchMode):
    """Gives every draw the numbers that it gave at first, and leaves the generators alone."""

    def __init__(self, record: _Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        self.record.places[f"{name} ({_line()})"] = None
        if name != "randperm" and name not in _HELD:
            return func(*args, **kwargs)
        before = capture_random(every=False)
        drawn = func(*args, **kwargs)
        restore_random(before)
        # A permutation of the batch couples its samples, also held: it must not be the identity.
        return drawn.sort(descending=True).values if name == "randperm" else self._held(drawn)

    def _held(self, drawn: Tensor) -> Tensor:
        if not drawn.numel():
            return drawn
        row = drawn[:1] if drawn.dim() else drawn
        if not row.any():  # a mask that leaves nothing would hide everything
            row = drawn.amax(0, keepdim=True) if drawn.dim() else torch.ones_like(drawn)
        kept = self.record.rows.setdefault(self.count, row.detach().clone())
        self.count += 1
        if kept.shape != row.shape:
            self.record.other_shapes = True
            return drawn
        return drawn.copy_(kept.expand_as(drawn))


class _Outside(TorchDispatchMode):
    """Notices draws that no `_Hold` has seen."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draws = self._draws
        if torch.Tag.nondeterministic_seeded in func.tags:
            draws.escaped |= not any(record.is_open for record in draws.records)
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
