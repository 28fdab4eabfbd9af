"""Look at a loop whose forwards are not ours, in its first window.

A stream gives its losses and keeps its forwards to itself. What it does can still be seen: hooks on
the models see the outputs of the first forwards, and the graph of a loss tells how it was made.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from wholebatch.core.loss import Loss, Units, check_units
from wholebatch.core.loss_reduction import check_mean, check_sum, divisors
from wholebatch.coupled.adds_up import Look
from wholebatch.coupled.batchnorm.moments import recomputing
from wholebatch.coupled.batchnorm.policies import Policy, Statistics
from wholebatch.coupled.call_look import look_at_call, tensors_of
from wholebatch.coupled.contrastive.losses import refuse_in_parts
from wholebatch.coupled.finding import Finding
from wholebatch.coupled.loss_graph import linked_samples
from wholebatch.errors import LossError

__all__ = ["StreamLook"]

_log = logging.getLogger("wholebatch")

_MOST_OUTPUTS = 32
_READS = 3  # of divisors: one may be the size of a micro-batch, and not of the next


class StreamLook:
    """Refuses, in a loop's first window, what cannot be the update of the whole batch.

    - A mean that is given as a sum, and a sum that is given as a mean
      (`wholebatch.core.loss_reduction`).
    - A loss that compares samples with each other (`wholebatch.coupled.loss_graph`).
    - A model that lets samples act on each other by more than a BatchNorm, and state that its
      forward moves (`wholebatch.coupled.call_look`).

    How a door uses it:

    ```python
    look = StreamLook(models, audit=audit, policies=batchnorm_policies)
    look.watch()                          # before the first forward of a window: hooks on models
    look.at_backward(total, units)        # before every backward; or at_backward(mean=, units=)
    look.done()                           # after the last backward of every micro-batch
    look.end_window(micro_batches)        # the window is over
    ```

    The first call of each model is made again on a few samples and their halves, before it is made
    itself. `at_backward` reads the graph of the loss once for every kind of node that losses end
    with. In the first micro-batch it also differentiates that graph twice, and raises what was
    found. `done` then takes the hooks off; `end_window` does so in any case. After it `active` is
    False, and only losses such as `wb.info_nce` are still refused.

    A window that is all of the batch (one micro-batch, one rank) needs no `watch`. Models whose
    forwards run collectives (FSDP, DeepSpeed) must not be watched. With `audit=False` nothing is
    done. Hooks that a user has put on tensors between the outputs and the loss run more often in
    the first micro-batch.
    """

    def __init__(
        self, models: Iterable[nn.Module], *, audit: bool = True, policies: Iterable[Policy] = ()
    ) -> None:
        self._models = list(models)
        self._statistics = [policy for policy in policies if isinstance(policy, Statistics)]
        self._called: set[nn.Module] = set()  # in this micro-batch, with all modules below them
        self._judged: set[nn.Module] = set()
        self._found: list[Finding] = []
        self._looking = False
        self._audits = audit
        self._kinds: set[tuple[type, bool]] = set()  # of the nodes that losses ended with
        self._divisors: set[int] = set()  # what losses were divided by
        self._reads = 0
        self._handles: list[Any] = []
        self._depth = 0
        self._outputs: deque[Tensor] = deque(maxlen=_MOST_OUTPUTS)
        self._looked = False
        self._over = not audit
        self.active = audit  # False after the first window: nothing more is to be seen

    def watch(self) -> None:
        """Keep what the models give back, until there was a look at it."""
        if self._over or self._handles:
            return
        self.active = True
        for module in {m for model in self._models for m in model.modules()}:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            entering = module.register_forward_pre_hook(_Entering(self), with_kwargs=True)
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
        if (kind, mean is None) not in self._kinds:
            (check_sum if mean is None else check_mean)(scalar, check_units(units))
            self._kinds.add((kind, mean is None))
        if self._reads < _READS:
            self._reads += 1
            self._divisors |= divisors(scalar, check_units(units))
        if self._handles and in_parts:
            number = float(check_units(units))
            # One unit owns all rows of its micro-batch: only state can be wrong there.
            of_state = [finding for finding in self._found if finding.kind in ("state", "outside")]
            Look(tuple(of_state if number == 1 else self._found)).refuse(off="audit=False")
            self._refuse_comparisons(scalar, number)

    def done(self) -> None:
        """The backwards of a micro-batch are made: one that was looked at is enough."""
        if self._handles:
            self._outputs.clear()
            self._called.clear()
            if self._looked:
                self._remove_hooks()

    def end_window(self, micro_batches: int = 0) -> None:
        """The first window is over: nothing more is looked at.

        Warn of losses that were divided by the number of micro-batches.
        """
        self.active = False
        if micro_batches in self._divisors:
            _log.warning(
                "the loss is divided by %d, and the window has as many micro-batches. If that is "
                "for the accumulation, remove it: the window divides by its units, and nothing by "
                "the number of steps",
                micro_batches,
            )
            self._divisors.clear()
        if self._handles:
            self._remove_hooks()

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._outputs.clear()
        self._called.clear()
        self._over = True

    def _refuse_comparisons(self, scalar: Tensor, units: float) -> None:
        if units <= 0 or not self._outputs:
            return
        linked = linked_samples(scalar, list(self._outputs), units)
        if not linked:
            self._looked = linked is not None
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

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._looking:
            return
        if self._depth == 0 and torch.is_grad_enabled() and not recomputing():
            self._look_at(module, args, kwargs)
        self._depth += 1

    def _look_at(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Make the call on a few samples first; no buffer of a graph that is there may change."""
        inner: nn.Module = getattr(module, "module", module) if _is_ddp(module) else module
        known = not self._called.isdisjoint(module.modules()) or module in self._judged
        self._called.update(module.modules())
        if known or not inner.training or _runs_collectives(inner):
            return
        self._looking = True
        for policy in self._statistics:
            policy.counts = False
        try:
            found = look_at_call(inner, args, kwargs)
            if found is not None:
                self._judged.add(module)
                self._found += found
        finally:
            self._looking = False
            for policy in self._statistics:
                policy.counts = True

    def _leave(self, args: Any, kwargs: Any, output: Any) -> None:
        if self._looking:
            return
        self._depth -= 1
        if self._depth or not torch.is_grad_enabled() or recomputing():
            return
        given = tensors_of((args, kwargs))
        if not given or output is None:
            return
        for tensor in tensors_of(output):
            if tensor.requires_grad and tensor.shape[0] == given[0].shape[0]:
                self._outputs.append(tensor)


def _is_ddp(module: nn.Module) -> bool:
    return isinstance(module, nn.parallel.DistributedDataParallel)


def _runs_collectives(module: nn.Module) -> bool:
    return any(isinstance(m, nn.SyncBatchNorm) or _is_ddp(m) for m in module.modules())


class _Hook:
    """A hook that leaves itself out of copies and pickles of the model, and of compiled code."""

    def __init__(self, look: StreamLook) -> None:
        self._look = ref(look)  # a look that nobody holds any more keeps no outputs

    def __deepcopy__(self, memo: Any) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return _give_nothing, ()


class _Entering(_Hook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        look = None if torch.compiler.is_compiling() else self._look()
        if look is not None:
            look._enter(module, args, kwargs)


class _Leaving(_Hook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        look = None if torch.compiler.is_compiling() else self._look()
        if look is not None:
            look._leave(args, kwargs, output)


def _nothing(*_: Any) -> None:
    """Stands for a hook in a copy of the model."""


def _give_nothing() -> Any:
    return _nothing
