"""Detect writes to an open window that are not its own.

A loop that is changed by one line keeps its other lines: an `optimizer.zero_grad()` at its top
drops what the window has summed so far, an `optimizer.step()` updates from a part of it, and a
plain `loss.backward()` adds what the window does not count. None of them fails by itself, so they
are looked for between two backwards: every write to a tensor in place moves its version, and
reading that costs nothing. A write to `.data` moves none: in the first window, norms are compared
too. Values put back after a write are compared of one small parameter. A
`scheduler.step()` that the loop has kept changes the learning rate with every micro-batch; that is
warned of. A model that is put into evaluation mode, and not back again, is refused.
"""

from __future__ import annotations

import inspect
import logging
import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from wholebatch.errors import WindowError
from wholebatch.window.close import read_scalars
from wholebatch.window.gradient_store import DeviceStore

if TYPE_CHECKING:
    from wholebatch.window.window import Window


_log = logging.getLogger("wholebatch")

_requires_grad = operator.attrgetter("requires_grad")
_version = operator.attrgetter("_version")
_gradient = operator.attrgetter("grad")
_training = operator.attrgetter("training")


class Watch:
    """One small parameter as the last backward left it, and the learning rates."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        self._optimizers = optimizers
        self._warned = False
        self._norms: list[float] | None = []  # in the first window, of parameters and gradients
        self.forget()

    def forget(self) -> None:
        """Forget the window: it is over, or another one has been loaded."""
        self._norms = None if self._norms else self._norms
        self._small: tuple[nn.Parameter, Tensor] | None = None  # a parameter and its norm
        self._gradients: list[Tensor | None] = []
        self._made: list[int] = []  # the versions of the gradients
        self._written: list[int] = []  # the versions of the parameters
        self._rates: list[tuple[dict[str, Any], float]] = []  # groups, and what theirs were

    def remember(self, inputs: Sequence[nn.Parameter]) -> None:
        """Remember the parameters and their gradients after a backward of the window."""
        if self._small is None:
            if not inputs:
                return
            made = [parameter for parameter in inputs if parameter.grad is not None]
            # The smallest matrix: a bias may be zero, which decays to zero.
            small = min(made or inputs, key=lambda p: (p.dim() < 2, p.numel()))
            self._small = small, _norm_of(small)
            self.note_rates()
        self._gradients = list(map(_gradient, inputs))
        self._made = _versions_of(self._gradients)
        self._written = list(map(_version, inputs))
        if self._norms is not None:
            self._norms = _norms_of(inputs)

    def note_rates(self) -> None:
        """Note the learning rates, unless they were noted in this window."""
        if not self._rates:
            groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
            self._rates = [
                (group, group["lr"]) for group in groups if type(group.get("lr")) is float
            ]

    def warn_of_rates(self) -> None:
        """Warn, once, of a learning rate that is another than those noted."""
        if self._warned:
            return
        for group, before in self._rates:
            if group["lr"] != before:
                self._warned = True
                _log.warning(
                    "the learning rate changed in the middle of a window (%g → %g), and only its "
                    "value at the update counts: step the scheduler once per update, not once per "
                    "micro-batch",
                    before,
                    group["lr"],
                )
                return

    def changed(self, inputs: Sequence[nn.Parameter]) -> tuple[nn.Parameter, str] | None:
        """Return what was touched since: a parameter and "gradient", "value" or "frozen"."""
        if self._small is None:
            return None
        gradients, written = list(map(_gradient, inputs)), list(map(_version, inputs))
        made = _versions_of(gradients)
        if (
            (made, written) == (self._made, self._written)
            and all(map(operator.is_, gradients, self._gradients))
            and all(map(_requires_grad, inputs))
        ):
            # As in nearly every micro-step, which may be a short one.
            return self._changed_unseen(inputs) if self._norms else None
        if len(written) == len(self._written):  # else some were frozen since
            for i, one in enumerate(inputs):
                if gradients[i] is not self._gradients[i] or made[i] != self._made[i]:
                    return one, "gradient"
            moved = [one for i, one in enumerate(inputs) if written[i] != self._written[i]]
            small, norm = self._small
            back = any(one is small for one in moved) and torch.equal(_norm_of(small), norm)
            if moved and not back:  # not weights that were swapped out and back again
                return moved[0], "value"
        frozen = next((one for one in inputs if not one.requires_grad), None)
        return None if frozen is None else (frozen, "frozen")

    def _changed_unseen(self, inputs: Sequence[nn.Parameter]) -> tuple[nn.Parameter, str] | None:
        """Return what was written by its `.data`, which moves no version."""
        pairs = zip(self._norms or (), _norms_of(inputs), strict=True)
        for place, (before, now) in enumerate(pairs):
            if before != now and not math.isnan(before):
                return inputs[place // 2], "gradient" if place % 2 else "value"
        return None


def _norms_of(inputs: Sequence[nn.Parameter]) -> list[float]:
    """Return the norm of each parameter and of its gradient; 0 of what is no plain tensor."""
    held = [one for p in inputs for one in (p.detach(), p.grad)]
    plain = [type(one) is Tensor and one.layout is torch.strided for one in held]
    some = [one for one, is_plain in zip(held, plain, strict=True) if one is not None and is_plain]
    found = iter(read_scalars(torch._foreach_norm(some)) if some else [])
    return [next(found) if is_plain else 0.0 for is_plain in plain]


def _versions_of(gradients: Sequence[Tensor | None]) -> list[int]:
    return [-1 if gradient is None else gradient._version for gradient in gradients]


def _norm_of(parameter: nn.Parameter) -> Tensor:
    """Return one number that an update changes: a copy of the values would take memory."""
    values = parameter.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    norm: Tensor = torch.linalg.vector_norm(values, dtype=wide)
    return norm


def _depends_on_mode(module: nn.Module) -> bool:
    """True if a forward reads whether its module is trained, and not for a dropout of rate 0."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or "training" not in code.co_names:
        return False
    drops = [module, *(one for one in module.children() if isinstance(one, _DropoutNd))]
    held = ((name, value) for one in drops for name, value in vars(one).items())
    rates = [v for name, v in held if "drop" in name or name == "p"]
    rates = [rate for rate in rates if isinstance(rate, int | float)]
    return any(rates) if rates else True


_WHY = {
    "gradient": (
        "the gradient of {} has changed since the window's last backward. A window makes, clips "
        "and clears its gradients itself: remove zero_grad(), loss.backward() and gradient "
        "clipping from {by} (clip_norm= clips)"
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
_WHY_IN_HOST = {
    "gradient": (
        "the gradient of {} has changed since the window's last backward: call zero_grad(), clip "
        "gradients and make other backwards only when the window is complete"
    ),
    "value": (
        "{} has changed in the middle of the window: call optimizer.step() only when the window is "
        "complete"
    ),
    "frozen": "{} was frozen in the middle of the window: freeze and unfreeze between windows",
}


class Untouched:
    """Refuses writes to an open window by the loop, a loss function, or another library (`by`)."""

    def __init__(self, window: Window, by: str = "the loop") -> None:
        self._window = window
        self._by = by
        sync = window.sync
        # Elsewhere gradients are not in `.grad` between two backwards, or the engine moves them.
        plain = isinstance(window.store, DeviceStore) and not sync.grows_own_graph
        self._looks = plain and sync.keeps_gradients
        self._watch = Watch(window.target.optimizers)
        self.note_rates = self._watch.note_rates
        modules = [module for model in window.target.models for module in model.modules()]
        self._by_mode = [module for module in modules if _depends_on_mode(module)]
        self._modes: list[bool] = []  # of those, in this window

    def forget(self) -> None:
        """Forget the window: it is over, or another one has been loaded."""
        self._watch.forget()
        self._modes = []

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Check before a backward of the window that nobody has touched it; remember it after."""
        self.check()
        yield
        self.remember()

    def remember(self) -> None:
        """Remember the parameter and its gradient after a backward of the window."""
        modes = list(map(_training, self._by_mode))
        self._modes = self._modes or modes
        if modes != self._modes:
            self._refuse_mode(modes)
        if self._looks:
            self._watch.remember(self._window.now.inputs)

    def _refuse_mode(self, modes: Sequence[bool]) -> None:
        """Refuse a micro-batch of a model that is in another mode than for those before."""
        place = list(map(operator.ne, modes, self._modes)).index(True)
        models = self._window.target.models
        names = {module: name for model in models for name, module in model.named_modules()}
        module = self._by_mode[place]
        self._window.now.broken = True
        raise WindowError(
            f"{names.get(module) or 'the model'} ({type(module).__name__}) was put into "
            f"{'training' if modes[place] else 'evaluation'} mode in the middle of the window, so "
            "that its samples do not see the same model: after an evaluation, call model.train() "
            "(and put layers that are frozen back into eval()) before the next forward; discard() "
            "drops what this window holds"
        )

    def check(self) -> None:
        """Refuse to go on with a window that is no longer what its backwards made."""
        window = self._window
        scale, optimizers = window.target.scale, window.target.optimizers
        if window.open is not None and scale is not None and scale.is_unscaled(optimizers):
            raise WindowError(
                "scaler.unscale_() in the middle of a window, whose close unscales the gradients: "
                "remove it (clip_norm= clips); discard() drops what this window holds"
            )
        found = self._watch.changed(window.now.inputs)
        if found is None or window.open is None or window.now.broken:
            self._watch.warn_of_rates()
            return
        parameter, what = found
        table = _WHY_IN_HOST if self._by == "the host" else _WHY
        why = table[what].format(window.target.name_of(parameter), by=self._by)
        held = (
            f"discard() drops the {window.now.micro_batches} micro-batches that this window holds"
        )
        raise WindowError(why if self._by == "the loss function" else f"{why}; {held}")
