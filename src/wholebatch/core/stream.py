"""Windows in a loop whose forwards are not ours: what `Accumulator` and the adapters share.

Such a loop gives its losses one by one. So BatchNorm has no lock-step, what cannot be the update of
the whole batch is looked for in the first window, and nobody else may write the open window.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, cast, overload

import torch
from torch import Tensor, nn

from wholebatch.compile import Execute
from wholebatch.core.close import check_terms
from wholebatch.core.compiled_loss import CompiledLoss, Pending
from wholebatch.core.foreign_writes import Untouched
from wholebatch.core.loss import Loss, Terms, Units, check_units, mean_loss, wide
from wholebatch.core.window import Step, Window
from wholebatch.coupled import choose as choose_batchnorm
from wholebatch.coupled.audit import warn_of_spectral_norms
from wholebatch.coupled.batchnorm.policies import Refuse, Statistics
from wholebatch.coupled.stream_look import StreamLook
from wholebatch.errors import LossError

_log = logging.getLogger("wholebatch")

_MOST_SHAPES = 64


@dataclass(frozen=True)
class GivenLoss:
    """The loss of one micro-batch as a loop gives it: a sum or a mean over its units.

    >>> weight = torch.ones((), requires_grad=True)
    >>> GivenLoss.of(weight * 6, units=3).total.item()
    6.0
    >>> GivenLoss.of(mean=weight * 2, units=3).total.item()
    6.0
    """

    loss: Tensor
    units: Units
    is_mean: bool = False
    whole: Loss | None = None
    """The `wb.Loss` that it was given as, if it was."""

    @classmethod
    def of(
        cls,
        total: Tensor | Loss | Terms | None = None,
        units: Units | None = None,
        mean: Tensor | None = None,
    ) -> GivenLoss:
        """Return the loss that `backward(total, units=)` or `backward(mean=, units=)` was given."""
        if mean is not None and total is not None:
            raise LossError(
                "backward() with both of total and mean=: total is the sum over the units and mean "
                "is the mean over them; give one of the two"
            )
        if isinstance(total, Loss):
            if units is not None:
                raise LossError("units= beside a wb.Loss, which carries its own: give one")
            return cls(total.total, total.units, whole=total)
        if isinstance(total, Terms):
            check_terms(None, total.by_name)  # refuses: a stream cannot know the terms' totals
        loss = total if mean is None else mean
        if loss is None:
            raise LossError(
                "backward() without a loss: give total, the sum over its units, or mean=, the mean "
                "over them, with units="
            )
        if units is None:
            raise LossError(
                "backward(mean=...) without units=: say what it is the mean over (units=samples, "
                "tokens or weights)"
                if mean is not None
                else "backward(total) without units=: total is a sum; say what it is a sum over "
                "(units=samples, tokens or weights), or say that it is a mean: "
                "backward(mean=..., units=), or pass wb.Loss / wb.mean_loss(mean, units)"
            )
        return cls(cast("Tensor", loss), check_units(units), mean is not None)

    def look_at(self, look: StreamLook, *, in_parts: bool, place: int = 0) -> None:
        """Refuse a loss whose graph shows that micro-batches do not add up to the whole batch.

        After the first window only losses of other shapes or units are looked at.
        """
        units = None if isinstance(self.units, Tensor) else self.units
        shapes = (place, self.is_mean, units, self._reduced_from())
        is_known = shapes in look.shapes or len(look.shapes) >= _MOST_SHAPES
        if is_known and not look.active and type(self.whole) in (Loss, type(None)):
            return
        where: dict[str, Any] = {"in_parts": in_parts, "place": place}
        if self.is_mean:
            look.at_backward(mean=self.loss, units=self.units, **where)
        else:
            look.at_backward(self.whole or self.loss, self.units, **where)
        look.shapes.add(shapes)

    def _reduced_from(self) -> tuple[Any, ...]:
        """Return the shapes that the loss was reduced from, without reading a number."""
        found: list[Any] = []
        waiting = [getattr(self.loss, "grad_fn", None)]
        for _ in range(_MOST_SHAPES):
            for child, place in getattr(waiting.pop(), "next_functions", ()) if waiting else ():
                given = getattr(child, "_input_metadata", ())
                shape = given[place].shape if given else ()
                (found if len(shape) else waiting).append(str(shape) if len(shape) else child)
        return tuple(found)

    @property
    def summed(self) -> Tensor:
        """The sum, with its graph."""
        return mean_loss(self.loss, self.units).total if self.is_mean else self.loss

    @property
    def weight(self) -> Units:
        """The factor that makes the loss a sum; a tensor in float64."""
        if not self.is_mean:
            return 1.0
        return self.units.double() if isinstance(self.units, Tensor) else self.units

    @property
    def total(self) -> Tensor | float:
        """The sum, detached; a mean over no units (0/0) adds nothing."""
        value = wide(self.loss.detach().reshape(()))
        units = self.units
        if not self.is_mean:
            return value
        if isinstance(units, Tensor):
            units = units.to(value.device)
            # Not 0.0: where() would copy it from the host, and wait for the device.
            return torch.where(units == 0, value.new_zeros(()), value * units)
        return value * units if units else 0.0


class Stream:
    """The base of objects with windows that a loop fills."""

    by: ClassVar[str] = "the loop"
    """Who writes what an open window must be left alone with."""
    adds: ClassVar[bool] = True
    """True if eager code may add weight gradients by the matrix product itself."""

    def __init__(self, window: Window, *, batchnorm: str, audit: bool) -> None:
        target, sync = window.target, window.sync
        self._window = window
        self._untouched = Untouched(window, self.by)
        reduce = sync.sum_tensor if sync.ranks > 1 else None
        self._batchnorms = [
            choose_batchnorm(batchnorm, model, reduce=reduce) for model in target.models
        ]
        for model in target.models:
            warn_of_spectral_norms(model)
        # Only these have something to do at every micro-batch.
        self._counting = [one for one in self._batchnorms if isinstance(one, Statistics)]
        self._refusing = [one for one in self._batchnorms if isinstance(one, Refuse) and one.norms]
        self._look = StreamLook(target.models, audit=audit, policies=self._batchnorms)
        self.pending = Pending()
        self._counts = True  # False while a micro-batch only takes part in others' collectives

    def __del__(self) -> None:
        window = getattr(getattr(self, "_window", None), "open", None)
        failed = hasattr(sys, "last_type")  # the program ends by an error, which says enough
        if window is not None and window.micro_batches and not (window.saved or failed):
            _log.warning(
                "%s is gone with an open window: its %d micro-batches have made no update. Close "
                "the short last window: flush(), or over(loader), which knows the end (with "
                "Accelerate: prepare the loader)",
                type(self).__name__,
                window.micro_batches,
            )

    @property
    def updates(self) -> int:
        """Updates made so far."""
        return self._window.updates

    @property
    def skipped(self) -> int:
        """Windows that made no update (not finite, or without units)."""
        return self._window.skipped

    @property
    def micro_batches(self) -> int:
        """Micro-batches that the open window holds."""
        return self._window.now.micro_batches

    @overload
    def compile(self, loss: Callable[..., Any], *, execute: Execute = "auto") -> CompiledLoss: ...

    @overload
    def compile(
        self, loss: None = None, *, execute: Execute = "auto"
    ) -> Callable[[Callable[..., Any]], CompiledLoss]: ...

    def compile(
        self, loss: Callable[..., Any] | None = None, *, execute: Execute = "auto"
    ) -> CompiledLoss | Callable[[Callable[..., Any]], CompiledLoss]:
        """Return the loss function as one that runs at the speed of `WholeBatch`.

        ```python
        @acc.compile
        def loss(micro):
            logits = model(micro["x"])
            return wb.cross_entropy(logits, micro["y"])

        for micro in acc.over(loader):
            acc.backward(loss(micro))
        ```

        The function returns a `wb.Loss` (or a tensor of per-unit losses). A call runs forward,
        backward and addition as one graph, where that is possible, and by eager code where it is
        not. `backward` then only enters the loss. Tensors to look at (an accuracy) go into
        `wb.Loss(total, units, extras={...})`, and come back in `loss.extras`.
        """
        if loss is None:
            return functools.partial(self.compile, execute=execute)
        return self.compiled(loss, execute)

    def compiled(
        self, loss: Callable[..., Any], execute: Execute, reads: Callable[..., Any] | None = None
    ) -> CompiledLoss:
        """Return a compiled loss function of these windows (`reads`: see `CompiledLoss`)."""
        return CompiledLoss(
            loss,
            door=self,
            window=self._window,
            execute=execute,
            keeps_moments=bool(self._counting),
            reads=reads,
        )

    @contextmanager
    def micro_step(self, modules: nn.Module) -> Iterator[bool]:
        """Return the context of a compiled function's micro-step; False if only eager code may.

        `modules` holds all modules that the function uses.
        """
        self.pending.refuse()
        if self._window.open is not None:
            self._window.open.refuse_broken()
        self._untouched.check()
        yield not self._look.active
        self._untouched.remember()

    def look_at_function(self, model: nn.Module, call: Callable[..., Any], micro: Any) -> None:
        """Refuse a loss function whose micro-batches do not add up to the whole batch."""
        if self._in_parts and self._window.sync.ranks == 1:
            given = {"args": micro["args"], "kwargs": micro["kwargs"]}
            self._look.at_function(model, lambda few: call(None, {**micro, **few}), given)

    def add_eagerly(self, loss: Loss | Terms) -> None:
        """Make the backward of a compiled function's loss; refuse several terms.

        Another backward may follow, so that the close reduces.
        """
        if self._look.active and isinstance(loss, Loss):
            self._look.at_backward(loss, in_parts=self._in_parts)
        self._window.add_loss(loss, counts=self._counts)

    @property
    def _in_parts(self) -> bool:
        """True if this micro-batch is not the whole global batch."""
        return True

    def mark_broken(self) -> None:
        """Let the window be discarded: some gradients of a micro-batch are in, others are not."""
        if self._window.open is not None:
            self._window.open.broken = True

    def discard(self) -> None:
        """Drop what the window holds; the next micro-batch begins a new one."""
        self._window.discard()
        self._untouched.forget()
        self.pending.loss = None
        self._look.done()
        for policy in self._counting:
            policy.discard_window()

    def _close_window(self, **how: Any) -> Step:
        """Close the window, and merge its running statistics, unless it is skipped."""
        self._untouched.forget()
        try:
            step = self._window.close(**how)
            for policy in self._counting if step.skipped is None else ():
                policy.end_window()
            return step
        finally:
            for policy in self._counting:
                policy.discard_window()
