"""Detect writes to an open window that are not its own.

A loop that is changed by one line keeps its other lines: an `optimizer.zero_grad()` at its top
drops what the window has summed so far, an `optimizer.step()` updates from a part of it, and a
plain `loss.backward()` adds what the window does not count. None of them raises an error, so they
are searched for between two backwards: every in-place write changes a tensor's version, which costs
nothing to read. A write to `.data` does not change it; windows 1, 2, 4, 8, … compare the norms too.
A model that is put into evaluation mode, and not back again, is refused.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from wholebatch.distributed.ddp import Replicated
from wholebatch.errors import WindowError
from wholebatch.warn_user import warn_user
from wholebatch.window.close import read_scalars
from wholebatch.window.ledger import Ledger
from wholebatch.window.window import is_tested_window

_training = operator.attrgetter("training")
_gradient = operator.attrgetter("grad")
_version = operator.attrgetter("_version")
_state = operator.attrgetter("_version", "requires_grad")


class Watch:
    """The gradients and parameters as the last backward left them, and the learning rates."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        self._optimizers = optimizers
        self.forget()

    def forget(self) -> None:
        """Forget the window: it is over, or another state has been loaded."""
        self._gradients: list[Tensor | None] = []  # held: no other tensor gets the id of one
        self._writes: list[int] = []  # into each gradient
        self._states: list[tuple[int, bool]] = []
        self._rates: list[tuple[float, int]] = []  # at the first backward
        self._norms: list[float] | None = None  # of the gradients, and of the parameters

    def remember(self, inputs: Sequence[nn.Parameter], *, norms: bool = False) -> None:
        """Remember the parameters and their gradients after a backward; their `norms` too."""
        self._gradients = list(map(_gradient, inputs))
        self._writes = _writes_into(self._gradients)
        self._states = list(map(_state, inputs))
        self._norms = _norms_of(inputs) if norms else None
        self._rates = self._rates or self._rates_now()

    def _rates_now(self) -> list[tuple[float, int]]:
        """Return the rates; of one in a tensor, which may be on a device, how often it was set."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        rates = [group["lr"] for group in groups if "lr" in group]
        return [(0.0, rate._version) if isinstance(rate, Tensor) else (rate, 0) for rate in rates]

    def refuse_other_rates(self) -> None:
        """Refuse a learning rate that has changed since the window's first backward."""
        rates = zip(self._rates, self._rates_now(), strict=False)
        if any(before != now for before, now in rates):
            raise WindowError(
                "the learning rate changed in the middle of a window, and only its value at the "
                "update counts: step the scheduler once per update (scheduler= does), not once per "
                "micro-batch"
            )

    def changed(self, inputs: Sequence[nn.Parameter]) -> tuple[nn.Parameter, str] | None:
        """Return the first change since then: a parameter and "gradient", "value" or "frozen"."""
        if not self._states:
            return None
        gradients, states = list(map(_gradient, inputs)), list(map(_state, inputs))
        writes = _writes_into(gradients)
        are_same = all(map(operator.is_, gradients, self._gradients))
        if not (are_same and writes == self._writes and states == self._states):
            for place, parameter in enumerate(inputs[: len(self._states)]):
                if not states[place][1]:
                    return parameter, "frozen"
                is_kept = gradients[place] is self._gradients[place]
                if not is_kept or writes[place] != self._writes[place]:
                    return parameter, "gradient"
                if states[place] != self._states[place]:
                    return parameter, "value"
        if self._norms is not None:
            pairs = zip(self._norms, _norms_of(inputs), strict=True)
            for place, (before, now) in enumerate(pairs):
                if before != now and not math.isnan(before):
                    what = "gradient" if place < len(inputs) else "value"
                    return inputs[place % len(inputs)], what
        return None


def _writes_into(gradients: Sequence[Tensor | None]) -> list[int]:
    """Return how often each gradient was written into; -1 where there is none."""
    try:
        return list(map(_version, gradients))
    except AttributeError:  # one is None
        return [-1 if gradient is None else gradient._version for gradient in gradients]


@torch.no_grad()
def _norms_of(inputs: Sequence[nn.Parameter]) -> list[float]:
    """Return the norms of the gradients and then of the parameters; 0 where there is none."""
    empty = inputs[0].detach().new_zeros(0)
    gradients = [empty if it.grad is None else it.grad for it in inputs]
    return read_scalars(torch._foreach_norm(list(map(_dense_local, (*gradients, *inputs)))))


def _dense_local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _depends_on_mode(module: nn.Module) -> bool:
    """True if a forward reads whether its module is trained, and is no dropout of rate 0."""
    if isinstance(module, _DropoutNd) and module.p == 0:
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "training" in code.co_names


def warn_of_empty_steps(owner: object, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Warn of a `step()` of these optimizers without any gradient, as long as `owner` lives.

    A loop that kept the lines after its backward calls it after the window has made its update.
    """

    def warn(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        has_closure = any(value is not None for value in (*args[1:], *kwargs.values()))
        gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
        if not has_closure and all(gradient is None for gradient in gradients):
            warn_user(
                "optimizer.step() found no gradients: the window's last backward has made the "
                "update. Remove optimizer.step(), optimizer.zero_grad() and gradient clipping "
                "from the loop, which have no effect there; clip_norm= clips"
            )

    for optimizer in optimizers:
        finalize(owner, optimizer.register_step_pre_hook(warn).remove)


def refuse_unreduced_steps(ledger: Ledger) -> None:
    """Refuse a step of the user's own on gradients that the window holds back from reduction.

    While a window exists, DDP's own reduction is off: a plain `loss.backward()` beside it makes the
    gradient of one rank, and a step with it lets the models of the ranks drift apart.
    """
    if not isinstance(ledger.sync, Replicated) or ledger.sync.ranks == 1:
        return
    holder = ref(ledger)

    def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        ledger = holder()
        if ledger is None or ledger.store.is_stepping or ledger.leaves_gradients:
            return
        if ledger.open is not None:
            return  # refused by the window itself, or a step around its last backward
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            raise WindowError(
                "optimizer.step() outside of a window, on a DistributedDataParallel model whose "
                "reduction is off as long as its Accumulator or WholeBatch exists: these gradients "
                "are those of one rank. Give the losses to backward() or step() of wholebatch, or "
                "delete its object before a plain loop"
            )

    for optimizer in ledger.target.optimizers:
        finalize(ledger, optimizer.register_step_pre_hook(refuse).remove)


_WHY = {
    "gradient": (
        "the gradient of {} has changed since the window's last backward. The window computes "
        "the gradients and makes the update: remove zero_grad(), loss.backward(), "
        "optimizer.step(), scaler.unscale_() and gradient clipping from {by}{clips}"
    ),
    "value": (
        "{} has changed in the middle of the window. The window's last backward makes the "
        "update: remove optimizer.step(), and what else writes into it, from {by}"
    ),
    "frozen": (
        "{} was frozen in the middle of the window. Freeze and unfreeze between windows, where "
        "backward() has returned a Step"
    ),
}


class Untouched:
    """Refuses writes to an open window by the loop, a loss function, or another library (`by`)."""

    def __init__(self, ledger: Ledger, by: str = "the loop") -> None:
        self._ledger = ledger
        self._by = by
        # Elsewhere gradients are not in `.grad` between two backwards, or the engine moves them.
        self._looks = ledger.sync.adds_to_parameters
        self._watch = Watch(ledger.target.optimizers)
        modules = [module for model in ledger.target.models for module in model.modules()]
        self._by_mode = [module for module in modules if _depends_on_mode(module)]
        self._modes: list[bool] | None = None  # of those, in this window
        self._norms = False  # True if norms are compared in this window

    def forget(self) -> None:
        """Forget the window: it is over, or another one has been loaded."""
        self._watch.forget()
        self._modes = None

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Check before a backward that no other code wrote to the window; note its state after."""
        self.check(rates=True)
        yield
        self.remember()

    def remember(self) -> None:
        """Remember the parameter and its gradient after a backward of the window."""
        modes = list(map(_training, self._by_mode))
        if self._modes is None:
            self._modes, self._norms = modes, is_tested_window(self._ledger.number)
        if modes != self._modes:
            self._refuse_mode(modes, self._modes)
        if self._looks:
            self._watch.remember(self._ledger.inputs, norms=self._norms)

    def _refuse_mode(self, modes: Sequence[bool], before: Sequence[bool]) -> None:
        """Refuse a micro-batch of a model that is in another mode than for those before."""
        place = list(map(operator.ne, modes, before)).index(True)
        models = self._ledger.target.models
        names = {module: name for model in models for name, module in model.named_modules()}
        module = self._by_mode[place]
        self._ledger.broken = "a micro-batch of this window saw the model in another mode"
        raise WindowError(
            f"{names.get(module) or 'the model'} ({type(module).__name__}) was put into "
            f"{'training' if modes[place] else 'evaluation'} mode in the middle of the window, so "
            "its samples would not see the same model. After an evaluation, call model.train() "
            "(and eval() on frozen layers) before the next forward; discard() drops what this "
            "window holds"
        )

    def check(self, *, rates: bool = False) -> None:
        """Refuse to go on with a window that is no longer what its backwards made.

        With `rates`, refuse a learning rate that has changed since its first backward.
        """
        ledger, window = self._ledger, self._ledger.open
        change = None if window is None else self._watch.changed(window.inputs)
        if change is None or ledger.broken:
            if rates:
                ledger.schedules.refuse_moved(in_window=window is not None)
                self._watch.refuse_other_rates()
            return
        parameter, what = change
        clips = " (clip_norm= clips)" if self._by == "the loop" else ""
        why = _WHY[what].format(ledger.target.name_of(parameter), by=self._by, clips=clips)
        held = f"discard() drops what this window holds ({ledger.held} of its micro-batches)"
        raise WindowError(why if self._by == "the loss function" else f"{why}; {held}")
