"""The check of a graph against eager code, on one of the user's micro-batches, before its use."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.compile.cuda_graph import Runnable, rehearse
from wholebatch.compile.execute_mode import CannotTrace
from wholebatch.compile.gradient_buffers import Casts, Gradients, empty_cache, room_for
from wholebatch.compile.graph_inputs import Inputs
from wholebatch.compile.joint_graph import JointStep
from wholebatch.compile.trace import Form
from wholebatch.losses.loss import as_loss, terms_of
from wholebatch.window.autocast import Precision
from wholebatch.window.forward_state import ForwardState
from wholebatch.window.precision import SIXTEEN_BIT


@dataclass
class EagerResult:
    """The eager result of one micro-batch, to compare a graph with."""

    inputs: Inputs
    form: Form
    results: list[Tensor]
    """The totals, and the tensors that were handed back beside them."""
    before: ForwardState
    earlier: Sequence[Tensor | None] | None
    """The gradients of the window's earlier micro-batches, by parameter, if they were kept."""
    alone: bool
    """True if this is the first micro-batch of its window."""

    def gradients(
        self, used: Sequence[int], held: Sequence[Tensor | None]
    ) -> Sequence[Tensor] | None:
        """Return the gradients of this micro-batch alone, or None if they are not known.

        `held` is the present `.grad` of the parameters `used`; the earlier gradients are
        subtracted.
        """
        if self.earlier is None:
            return [g for g in held if g is not None] if self.alone else None
        pairs = [(g, self.earlier[i]) for i, g in zip(used, held, strict=True) if g is not None]
        if any(after.dtype in SIXTEEN_BIT for after, _ in pairs):
            return None  # A 16-bit sum is too coarse to recover the last addend.
        return [after if before is None else after - before for after, before in pairs]


@dataclass
class GraphCheck:
    """Holds the graphs of one micro-batch against its eager result."""

    done: EagerResult
    gradients: Gradients
    casts: Casts
    seeds: list[Tensor]
    model: nn.Module
    loss: Callable[[Any, Any], Any]
    precision: Precision
    _rounding: list[float] | None = None
    """The distance of eager code with moved weights, by gradient, once that has run."""

    def compare(self, joint: JointStep, run: Runnable, *, rehearses: bool = False) -> None:
        """Run a joint step from the state before eager code ran; raise CannotTrace if it differs.

        A graph that draws random numbers runs, but there is nothing to compare.
        """
        done, device = self.done, self.seeds[0].device
        # The trial run writes into the buffers: save the window's gradients first.
        held = self.gradients.set_aside(joint.used)
        self.casts.refresh()

        def results() -> list[Tensor]:
            done.before.restore()
            torch._foreach_zero_(self.gradients.of(joint.used))
            totals, rest = run(done.inputs.tensors, self.seeds)
            return done.form.read(totals, rest).comparable

        try:
            outcome = rehearse(results, device, captures=rehearses)
            if not joint.random:
                sixteen_bit, compiled = joint.traced.sixteen_bit, joint.compiled
                held_against = partial(hold_against, sixteen_bit=sixteen_bit, compiled=compiled)
                held_against(outcome, done.results, "loss")
                wanted = done.gradients(joint.used, held)
                if wanted is not None:
                    buffers = self.gradients.of(joint.used)
                    moved = partial(self._distance_of_rounding, joint, wanted)
                    held_against(buffers, wanted, "gradient", moved=moved)
        finally:
            self.gradients.put_in_place(joint.used, held)

    def _distance_of_rounding(self, joint: JointStep, wanted: Sequence[Tensor]) -> list[float]:
        """Return how far eager code is from itself with weights that rounding has moved.

        A number for each gradient.
        """
        if self._rounding is None:
            used = [self.gradients.parameters[index] for index in joint.used]
            # What the graph has left in the allocator would lie beside a second run of eager code.
            empty_cache(self.seeds[0].device)
            self.done.before.restore()
            try:
                with weights_moved(self.model):
                    micro = self.done.inputs.around(self.done.inputs.tensors)
                    parts = self.model, self.loss, micro, used, self.seeds, self.precision
                    pairs = zip(gradients_of(*parts), wanted, strict=True)
                    self._rounding = [_distance([after], [before]) for after, before in pairs]
            finally:
                self.precision.let_go()  # It may have kept casts of the moved weights.
        return self._rounding


def hold_against(
    actual: Sequence[Tensor],
    wanted: Sequence[Tensor],
    what: str,
    *,
    sixteen_bit: bool,
    compiled: bool,
    moved: Callable[[], Sequence[float]] | None = None,
) -> None:
    """Raise CannotTrace if `found` of a graph differs from `wanted` by more than rounding.

    `sixteen_bit`: a part of the graph computes in 16 bit. As traced it may differ by a fiftieth,
    compiled by a tenth. Some models amplify rounding beyond that (BatchNorms, by any amount). For
    these, `moved` says how far each gradient of eager code is from itself with weights that are
    moved by one rounding step: a graph may be twice as far from eager code, and no farther.
    """
    reason = differs(actual, wanted, what, sixteen_bit=sixteen_bit, compiled=compiled)
    if reason is None:
        return
    if sixteen_bit and moved is not None:
        with contextlib.suppress(torch.OutOfMemoryError):
            own = moved()
            if _distance(actual, wanted) <= 2 * math.hypot(*own) and _are_like(actual, wanted, own):
                return
    raise CannotTrace(reason)


@torch.no_grad()
def differs(
    actual: Sequence[Tensor],
    wanted: Sequence[Tensor],
    what: str,
    *,
    sixteen_bit: bool,
    compiled: bool,
) -> str | None:
    """Return the reason why `found` differs from `wanted` by more than rounding, or None.

    The operations of a graph as traced are those of eager code. A compiler rounds otherwise, and an
    ill-conditioned model amplifies that.
    """
    if len(actual) != len(wanted):
        return f"it gives {len(actual)} tensors of {what} where eager code gives {len(wanted)}"
    dtype = wanted[0].dtype
    allowed = 1e-6 if dtype is torch.float64 else 1e-2
    if sixteen_bit:
        allowed = 0.1 if compiled else 0.02
    above, below = _distance(actual, wanted), _norm(wanted)
    if not 0.0 < below < float("inf") or above <= allowed * below:
        return None  # Or eager code is not finite, or there is nothing to compare.
    return f"its {what} differs from that of eager code by {above / below:.1e}"


@torch.no_grad()
def _are_like(actual: Sequence[Tensor], wanted: Sequence[Tensor], own: Sequence[float]) -> bool:
    """True if each gradient has about the size and direction of eager code's; tiny ones may not.

    Two vectors of one size that lie as far apart as this size have an angle of 60 degrees. Where
    eager code itself turns by about half of that or more (an untrained ResNet-50 turns by 80
    degrees), no direction is right. Sizes still are: of each to a factor of 2, since a few numbers
    scatter, and of all such gradients together to half.
    """
    tiny = 0.01 * _norm(wanted)
    turned: list[tuple[Tensor, Tensor]] = []
    for gradient, eager, rounding in zip(actual, wanted, own, strict=True):
        size = _norm([eager])
        small, large = sorted((_norm([gradient]), size))
        alike = large <= 2 * small
        if rounding > size / 2:
            turned.append((gradient, eager))
        else:
            alike = alike and _distance([gradient], [eager]) <= large
        if not (alike or large <= tiny):  # Neither, if it is not a number.
            return False
    if not turned:
        return True
    small, large = sorted(_norm(part) for part in zip(*turned, strict=True))
    return large <= 1.5 * small


def gradients_of(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    micro: Any,
    parameters: Sequence[nn.Parameter],
    seeds: Sequence[Tensor],
    precision: Precision,
) -> Sequence[Tensor]:
    """Return the gradients of a micro-batch by eager code, on the host if the device is full."""
    with torch.enable_grad():
        with precision.forward():
            terms = terms_of(as_loss(loss(model, micro)))
        gradients = torch.autograd.grad(
            [term.total for term in terms.values()],
            list(parameters),
            list(seeds),
            materialize_grads=True,
            allow_unused=True,
        )
    place = room_for(gradients)
    return [gradient.to(place) for gradient in gradients]


@contextlib.contextmanager
def weights_moved(model: nn.Module) -> Iterator[None]:
    """Move the weights by one rounding step of bf16, or not, at random, within this context.

    What eager code computes then differs by about as much as another order of rounding makes it
    differ. One bit of each is turned, and turned back: no copy is made.
    """
    _turn_last_bits(model)
    try:
        yield
    finally:
        _turn_last_bits(model)


_LAST_BIT = {
    torch.float32: (torch.int32, 1 << 16),
    torch.bfloat16: (torch.int16, 1),
    torch.float16: (torch.int16, 1 << 3),
}
"""Of bfloat16, in each of these dtypes."""


def _turn_last_bits(model: nn.Module) -> None:
    generators: dict[torch.device, torch.Generator] = {}
    for weight in model.parameters():
        if weight.dtype in _LAST_BIT and weight.layout is torch.strided:
            device = weight.device
            generator = generators.setdefault(device, torch.Generator(device).manual_seed(0))
            kind, bit = _LAST_BIT[weight.dtype]
            turned = torch.randint(
                2, weight.shape, generator=generator, device=device, dtype=torch.uint8
            )
            # By `data` it is no write into the parameter: the bits are as before in the end.
            weight.data.view(kind).bitwise_xor_(turned.to(kind) * bit)


def _distance(actual: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Return the norm of the difference, computed pair by pair on the device of `found`."""
    return _norm(a.to(b.dtype) - b.to(a.device) for a, b in zip(actual, wanted, strict=True))


def _norm(tensors: Iterable[Tensor]) -> float:
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    return float(torch.stack(norms).norm())
