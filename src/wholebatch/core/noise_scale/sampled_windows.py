"""The measurement of sampled windows: each micro-batch's gradient norm, or the running sum's."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from wholebatch.core.close import dense_gradients, read_scalars
from wholebatch.core.noise_scale.critical_batch import Estimator, NoiseScale, Observation, Sums
from wholebatch.core.precision import SIXTEEN_BIT
from wholebatch.core.window import SINGLE
from wholebatch.distributed.ddp import Replicated
from wholebatch.distributed.sync_strategy import Single
from wholebatch.errors import OptionError, UnsupportedError

if TYPE_CHECKING:
    from wholebatch.core.window import Step, Window

__all__ = ["Incoming", "Noise", "Probe", "check_noise"]


_HELD_BYTES = 32 * 2**20
"""The most bytes of gradients that wait to be measured in one kernel."""


class Incoming:
    """Observes every gradient just before it is added to `.grad`, and keeps only norms.

    The hooks are on autograd's accumulation nodes. So they are not among the user's hooks on the
    parameters, which a window removes.
    """

    def __init__(self) -> None:
        # Keep a reference: autograd would otherwise create the node again.
        self._nodes: list[Any] = []
        self._handles: list[Any] = []
        self._held: list[tuple[Tensor | None, ...]] = []
        self._bytes = 0
        self._norms: list[Tensor] = []

    def attach(self, parameters: Sequence[nn.Parameter]) -> None:
        """Observe the gradients of these parameters until `detach`."""
        self.detach()
        self._nodes = [get_gradient_edge(parameter).node for parameter in parameters]
        whole = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        # A hook runs for every parameter of every micro-batch: if all gradients fit, it only
        # appends.
        see: Any = self._held.append if whole <= _HELD_BYTES else self._see
        self._handles = [node.register_prehook(see) for node in self._nodes]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._nodes = []  # Drop the nodes: one that ever had a hook keeps calling Python.
        self._held.clear()
        self._norms = []
        self._bytes = 0

    def _see(self, gradients: tuple[Tensor | None, ...]) -> None:
        self._held.append(gradients)
        gradient = gradients[0]
        if gradient is not None:
            self._bytes += gradient.numel() * gradient.element_size()
            if self._bytes > _HELD_BYTES:
                self._look()

    def _look(self) -> None:
        with torch.no_grad():
            kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
            for (gradient,) in self._held:
                if gradient is None:
                    continue
                if gradient.is_sparse:
                    gradient = gradient.coalesce().values()
                if gradient.is_complex():
                    gradient = torch.view_as_real(gradient)
                kinds.setdefault((gradient.dtype, gradient.device), []).append(gradient)
            for (dtype, _), alike in kinds.items():
                wide = torch.float32 if dtype in SIXTEEN_BIT else None
                self._norms += torch._foreach_norm(alike, 2, wide)
        self._held.clear()
        self._bytes = 0

    def take(self) -> Tensor | None:
        """Return the norm of all gradients since the last call; None if there were none."""
        self._look()
        norms, self._norms = self._norms, []
        if not norms:
            return None
        if len({(norm.dtype, norm.device) for norm in norms}) > 1:
            norms = [norm.to(norms[0].device, torch.float64) for norm in norms]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm


Noise: TypeAlias = int | Literal["auto"] | None

_log = logging.getLogger("wholebatch")
_EVERY = 16
"""The interval of "auto". A measured window costs up to a fifth more; one in 16 costs about 1%."""


def check_noise(noise: object) -> Noise:
    """Return the option, or raise an OptionError that says what is allowed."""
    if noise is None or noise == "auto":
        return noise
    if isinstance(noise, bool) or not isinstance(noise, int) or noise < 1:
        raise OptionError(
            f'noise={noise!r}: must be None, "auto", or every how many windows to look at one'
        )
    return noise


@dataclass(frozen=True)
class Look:
    """The measurements of a window on this rank."""

    sums: Sums = field(default_factory=Sums)
    norm: float = 0.0  # The norm of the sum of all its micro-batches' gradients.
    is_whole: bool = True  # True if every micro-batch was seen.


class Probe:
    """Measures one window in `every`; all others are left alone.

    In a measured window the gradients are read once more. With several ranks there is one more
    small collective, and the gradients are reduced at the close instead of during the last
    backward: the norms must be those of the rank's own gradients. No bit of the update changes,
    nothing is copied, and nothing is read from the device before the end of the window.
    """

    def __init__(self, noise: Noise, window: Window, *, coupled: bool = False) -> None:
        self._window = window
        self._every = _EVERY if noise == "auto" else noise
        self.off = "not asked for" if noise is None else _hindrance(window, coupled)
        """The reason why nothing is measured, or None."""
        if self.off is not None and isinstance(noise, int):
            raise UnsupportedError(f"noise={noise}: {self.off}")
        if self.off is not None and noise == "auto":
            _log.info("the gradient noise scale is not measured: %s", self.off)
        self._estimator = Estimator()
        self._incoming = Incoming()
        self._norms: list[Tensor | float] = []
        self._own = True  # True if the norms are those of single micro-batches.
        self._has_terms = False
        self._is_whole = True
        self.active = False

    def begin(self, *, first: int = 0, together: bool = False, own: bool = False) -> None:
        """Begin a window, or begin it again; a resumed one already has `first` micro-batches.

        `together`: the window runs in lock-step, so no micro-batch has a gradient before the last.
        `own`: autograd adds every gradient itself, so it can be observed before.
        """
        window = self._window
        self.end()
        if self._every is not None and self.off is None and not together:
            # Skip the first window: it may be atypical (graphs are made in it).
            self.active = (window.updates + window.skipped) % self._every == 1 % self._every
        if not self.active:
            return
        self._is_whole = first == 0 or (len(self._norms) == first and self._own == own)
        if first == 0:
            self._norms = []
        self._own = own
        if own:
            groups = window.target.groups()
            self._incoming.attach([parameter for group in groups for parameter in group])

    @torch.no_grad()
    def micro_batch_done(self) -> None:
        """Record the norm after the gradient of another micro-batch was added."""
        if not self.active:
            return
        norm = self._incoming.take() if self._own else self._whole_norm()
        self._norms.append(math.nan if norm is None else norm)  # No gradient, so no information.

    def _whole_norm(self) -> Tensor | float:
        gradients = [g for group in self._window.groups for g in dense_gradients(group)]
        return self._window.sync.total_norm(gradients) if gradients else 0.0

    @torch.no_grad()
    def look(self) -> Look | None:
        """Return the measurements of the window, before its close clears them."""
        if not self.active:
            return None
        window = self._window
        units = window.units.get(SINGLE, [])
        self._has_terms = bool(set(window.units) - {SINGLE})
        if self._has_terms or not self._is_whole or len(units) < len(self._norms):
            return Look(is_whole=False)
        # The buffers hold seed × loss scale × the sum of the units' gradients.
        if window.known is not None:
            scale = window.known[SINGLE] / window.loss_scale
        else:
            scale = 1.0 / (read_scalars([window.seed])[0] * window.loss_scale)
        count = len(self._norms)  # Ignore later micro-batches: they only keep other ranks in step.
        whole = self._whole_norm() if window.sync.ranks == 1 else 0.0
        *norms, last = (norm * scale for norm in read_scalars([*self._norms, whole]))
        sums = Sums.of_own if self._own else Sums.of_growing
        return Look(sums(norms, read_scalars(units[:count])), last)

    def closed(self, look: Look | None, step: Step) -> None:
        """Add the measurements of a closed window. All ranks call this, or none."""
        if not self.active:
            return
        self.end()
        self._norms = []
        look = look or Look()
        sums, whole, sync = look.sums, look.norm, self._window.sync
        is_whole = look.is_whole
        if sync.ranks > 1:
            flags = [float(self._has_terms), float(not is_whole)]
            numbers = sync.sum([sums.moment, sums.weight, float(sums.count), *flags])
            sums = Sums(numbers[0], numbers[1], int(numbers[2]))
            self._has_terms, is_whole = numbers[3] > 0, numbers[4] == 0
            whole = step.grad_norm * step.units
        if self._has_terms:  # All ranks stop, or none.
            self.off = "the loss has several terms, each over units of its own"
            _log.warning("the gradient noise scale is not measured: %s", self.off)
        if step.skipped is not None or self.off is not None or not is_whole:
            return
        observation = Observation.of(sums, norm=whole, units=step.units)
        if observation is not None:
            self._estimator.add(observation)

    def end(self) -> None:
        """Stop measuring: the window is over, whatever its outcome."""
        self.active = False
        self._incoming.detach()

    @property
    def estimate(self) -> NoiseScale | None:
        """Return the present estimate of the noise scale, if any."""
        return None if self.off is not None else self._estimator.estimate()

    def state_dict(self) -> dict[str, Any]:
        """Return everything measured so far, even in the middle of a window."""
        norms = read_scalars(self._norms) if self._window.is_open else []
        return {"seen": self._estimator.state_dict(), "norms": norms, "own": self._own}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self._norms = []
        if state is not None:
            self._estimator.load_state_dict(state["seen"])
            self._own = bool(state.get("own", False))
            self._norms = list(state["norms"]) if self._window.is_open else []


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
    if window.calls_on_gradient and window.sync.ranks > 1:
        return "on_gradient= may change the gradient of all ranks before its norm is taken"
    if not window.store.in_grad:
        return 'the gradients are not kept in the device\'s memory; use gradients="device"'
    return None
