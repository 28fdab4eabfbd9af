"""Watches sampled windows: the norm of the gradient buffer after every micro-batch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from wholebatch.close import dense_gradients, read_scalars
from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.noise.estimate import Estimator, Growths, NoiseScale, Observation
from wholebatch.sync.replicated import Replicated
from wholebatch.sync.single import Single
from wholebatch.units import SINGLE

if TYPE_CHECKING:
    from wholebatch.step import Step
    from wholebatch.window import Window

__all__ = ["Noise", "Probe", "check_noise"]

Noise: TypeAlias = int | Literal["auto"] | None

_log = logging.getLogger("wholebatch")
_EVERY = 8
"""With "auto": a window that is watched costs at most a few percent, one in eight well below 1%."""


def check_noise(noise: object) -> Noise:
    """The option itself, or an OptionError that says what is allowed."""
    if noise is None or noise == "auto":
        return noise
    if isinstance(noise, bool) or not isinstance(noise, int) or noise < 1:
        raise OptionError(
            f'noise={noise!r}: must be None, "auto", or every how many windows to look at one'
        )
    return noise


class Probe:
    """Measures one window in `every`; all others pass untouched.

    A measured window adds one pass over the gradients for each micro-batch, and on several ranks
    one small collective; its gradients are reduced at the close instead of during the last
    backward, which changes no bit. Nothing is copied and nothing is read from the device before
    the window's close.
    """

    def __init__(self, noise: Noise, window: Window, *, coupled: bool = False) -> None:
        self._window = window
        self._every = _EVERY if noise == "auto" else noise
        self.off = "not asked for" if noise is None else _hindrance(window, coupled)
        """Why nothing is measured; None where it is."""
        if self.off is not None and isinstance(noise, int):
            raise UnsupportedError(f"noise={noise}: {self.off}")
        if self.off is not None and noise == "auto":
            _log.info("the gradient noise scale is not measured: %s", self.off)
        self._estimator = Estimator()
        self._norms: list[Tensor | float] = []
        self._has_terms = False
        self.active = False

    def begin(self, *, first: int = 0, together: bool = False) -> None:
        """A window begins, or begins again; `first` micro-batches of a resumed one are in it.

        `together`: in lock-step, where no micro-batch has a gradient before the last.
        """
        window = self._window
        self.active = False
        if self._every is not None and self.off is None and not together:
            # Not the first window: it may be of another kind (graphs are made in it).
            self.active = (window.updates + window.skipped) % self._every == 1 % self._every
        if first == 0:
            self._norms = []
        elif len(self._norms) != first:
            self.active = False  # resumed by another noise= than it was begun with

    @torch.no_grad()
    def micro_batch_done(self) -> None:
        """The gradient of another micro-batch is in."""
        if self.active:
            gradients = [g for group in self._window.groups for g in dense_gradients(group)]
            norm: Tensor | float = self._window.sync.total_norm(gradients) if gradients else 0.0
            self._norms.append(norm)

    def look(self) -> Look | None:
        """What the window has shown, before its close clears it."""
        if not self.active:
            return None
        window = self._window
        units = window.units.get(SINGLE, [])
        if set(window.units) - {SINGLE}:
            self._has_terms = True
            return None
        # The buffers hold seed × loss scale × the sum of the units' gradients.
        if window.known is not None:
            scale = window.known[SINGLE] / window.loss_scale
        else:
            scale = 1.0 / (read_scalars([window.seed])[0] * window.loss_scale)
        count = min(len(units), len(self._norms))
        return Look(
            [norm * scale for norm in read_scalars(self._norms[:count])],
            read_scalars(units[:count]),
        )

    def closed(self, look: Look | None, step: Step) -> None:
        """The window is closed: enter what was seen. All ranks come here, or none."""
        if not self.active:
            return
        self.active = False
        self._norms = []
        look = look or Look([], [])
        own = Growths.of(look.norms, look.units)
        sync = self._window.sync
        if sync.ranks == 1:
            whole = look.norms[-1] if look.norms else 0.0
            growths = own
        else:
            sums = [own.moment, own.weight, float(own.count), float(self._has_terms)]
            moment, weight, count, terms = sync.sum(sums)
            growths = Growths(moment, weight, int(count))
            whole = step.grad_norm * step.units
            self._has_terms = terms > 0  # all ranks stop, or none
        if self._has_terms:
            self.off = "the loss has several terms, each over units of its own"
            _log.warning("the gradient noise scale is not measured: %s", self.off)
        if step.skipped is not None or self.off is not None:
            return
        observation = Observation.of(growths, norm=whole, units=step.units)
        if observation is not None:
            self._estimator.add(observation)

    @property
    def estimate(self) -> NoiseScale | None:
        """The noise scale as far as it is known."""
        return None if self.off is not None else self._estimator.estimate()

    def state_dict(self) -> dict[str, Any]:
        """What was seen so far, in the middle of a window too."""
        norms = read_scalars(self._norms) if self._window.is_open else []
        return {"seen": self._estimator.state_dict(), "norms": norms}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self._norms = []
        if state is not None:
            self._estimator.load_state_dict(state["seen"])
            self._norms = list(state["norms"]) if self._window.is_open else []


class Look:
    """|A| after each of this rank's micro-batches, and their units."""

    def __init__(self, norms: Sequence[float], units: Sequence[float]) -> None:
        self.norms = norms
        self.units = units


def _hindrance(window: Window, coupled: bool) -> str | None:
    if coupled:
        return (
            "the samples of a batch depend on each other (exact BatchNorm, wb.Coupled), so no "
            "micro-batch has a gradient of its own"
        )
    if not isinstance(window.sync, Single | Replicated):
        return (
            "on a sharded model no rank holds the gradient of its own micro-batches; measure on "
            "one process or with DDP"
        )
    if not window.store.in_grad:
        return 'the gradients are not kept in the device\'s memory; use gradients="device"'
    return None
