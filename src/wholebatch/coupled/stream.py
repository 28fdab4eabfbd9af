"""Look at a loop whose forwards are not ours, in its first window.

A stream gives its losses and keeps its forwards to itself. What it does can still be seen: hooks on
the models see the outputs of the first forwards, and the graph of a loss tells how it was made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from wholebatch.coupled.contrastive import refuse_in_parts
from wholebatch.coupled.loss_graph import linked_samples
from wholebatch.coupled.moments import recomputing
from wholebatch.errors import LossError, SplitError
from wholebatch.loss import Loss, Units, check_units
from wholebatch.reduction import check_mean, check_sum
from wholebatch.splitting.structure import flatten

__all__ = ["StreamLook"]

_MOST_OUTPUTS = 32


class StreamLook:
    """Refuses, in a loop's first window, what cannot be the update of the whole batch.

    - A mean that is given as a sum, and a sum that is given as a mean (`wholebatch.reduction`).
    - A loss that compares samples with each other (`wholebatch.coupled.loss_graph`).

    How a door uses it:

    ```python
    look = StreamLook(models, audit=audit)
    look.watch()                          # before the first forward of a window: hooks on models
    look.at_backward(total, units)        # before every backward; or at_backward(mean=, units=)
    look.done()                           # after the last backward of every micro-batch
    look.end_window()                     # the window is over
    ```

    `at_backward` reads the graph of the loss once for every kind of node that losses end with. In
    the first micro-batch it also differentiates that graph twice. `done` then takes the hooks off;
    `end_window` does so in any case. Later calls cost one look into a set. A window that is all of
    the batch (one micro-batch, one rank) needs no `watch`. With `audit=False` nothing is done.
    """

    def __init__(self, models: Iterable[nn.Module], *, audit: bool = True) -> None:
        self._models = list(models)
        self._audits = audit
        self._kinds: set[type] = set()  # of the nodes that losses ended with
        self._handles: list[Any] = []
        self._depth = 0
        self._outputs: deque[Tensor] = deque(maxlen=_MOST_OUTPUTS)
        self._looked = False
        self._over = not audit

    def watch(self) -> None:
        """Keep what the models give back, until there was a look at it."""
        if self._over or self._handles:
            return
        for module in {m for model in self._models for m in model.modules()}:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            entering = module.register_forward_pre_hook(_Entering(self))
            leaving = module.register_forward_hook(
                _Leaving(self), with_kwargs=True, always_call=True
            )
            self._handles += [entering, leaving]

    def at_backward(
        self,
        total: Tensor | Loss | None = None,
        units: Units = 1,
        *,
        mean: Tensor | None = None,
        in_parts: bool = True,
    ) -> None:
        """Refuse this loss if its graph shows that it is none of the whole batch.

        Give what the door was given: the sum over `units`, a wb.Loss, or `mean=`. `in_parts` is
        False where this micro-batch is all of its window and there is one rank: any loss is right.
        """
        if not self._audits:
            return
        if isinstance(total, Loss):
            if in_parts:
                refuse_in_parts(total)
            units, total = total.units, total.total
        scalar = total if mean is None else mean
        kind = type(getattr(scalar, "grad_fn", None))
        if kind is type(None):
            return  # no loss at all: refused elsewhere
        assert scalar is not None
        if kind not in self._kinds:
            (check_sum if mean is None else check_mean)(scalar, units)
            self._kinds.add(kind)
        if self._handles and in_parts and self._outputs:
            self._refuse_comparisons(scalar, float(check_units(units)))

    def done(self) -> None:
        """The backwards of a micro-batch are made: one that was looked at is enough."""
        if self._handles:
            self._outputs.clear()
            if self._looked:
                self.end_window()

    def end_window(self) -> None:
        """Take the hooks off, for good."""
        if self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._outputs.clear()
            self._over = True

    def _refuse_comparisons(self, scalar: Tensor, units: float) -> None:
        if units <= 0:
            return
        linked = linked_samples(scalar, list(self._outputs), units)
        if not linked:
            self._looked = True
            return
        shown = ", ".join(map(str, linked[:5])) + (", ..." if len(linked) > 5 else "")
        raise LossError(
            f"this loss compares samples with each other: it links {len(linked)} of the model's "
            f"output rows ({shown}), and units={units:g} says that it is a sum over so many "
            "independent parts. Of a micro-batch it is not a part of the whole batch's loss. What "
            "to do: WholeBatch with loss=wb.Coupled(encode, loss), which sees the whole batch; "
            "where several rows make one unit (pairs, lists), give units= their number; "
            "audit=False accepts it of each micro-batch by itself"
        )

    # -------------------------------------------------------------- hooks

    def _enter(self) -> None:
        self._depth += 1

    def _leave(self, args: Any, kwargs: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth or not torch.is_grad_enabled() or recomputing():
            return
        given = _tensors((args, kwargs))
        if not given or output is None:
            return
        for tensor in _tensors(output):
            if tensor.requires_grad and tensor.shape[0] == given[0].shape[0]:
                self._outputs.append(tensor)


def _tensors(tree: Any) -> list[Tensor]:
    try:
        leaves = [leaf.value for leaf in flatten(tree)[0]]
    except SplitError:  # a container that cannot be taken apart
        return []
    return [value for value in leaves if isinstance(value, Tensor) and value.dim()]


class _Hook:
    """A hook that leaves itself out of copies and pickles of the model, and of compiled code."""

    def __init__(self, look: StreamLook) -> None:
        self._look = ref(look)  # a look that nobody holds any more keeps no outputs

    def __deepcopy__(self, memo: Any) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return _give_nothing, ()


class _Entering(_Hook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        look = None if torch.compiler.is_compiling() else self._look()
        if look is not None:
            look._enter()


class _Leaving(_Hook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        look = None if torch.compiler.is_compiling() else self._look()
        if look is not None:
            look._leave(args, kwargs, output)


def _nothing(*_: Any) -> None:
    """Stands for a hook in a copy of the model."""


def _give_nothing() -> Any:
    return _nothing
