"""The check of a graph against eager code, on one of the user's micro-batches, before its use."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wholebatch.compile.cuda_graph import Runnable, rehearse, wait_for
from wholebatch.compile.execute_mode import CannotTrace
from wholebatch.compile.gradient_buffers import Casts, Gradients
from wholebatch.compile.graph_inputs import Inputs
from wholebatch.compile.joint_graph import JointStep
from wholebatch.compile.trace import Form
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
    seconds: float
    """The time that eager code has taken."""

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


class NothingToCompare(Exception):
    """Eager code made no gradient, or one that is not finite: it proves nothing about a graph."""


@dataclass
class GraphCheck:
    """Holds the graphs of one micro-batch against its eager result."""

    done: EagerResult
    gradients: Gradients
    casts: Casts
    seeds: list[Tensor]
    _rounding: float | None = None
    """The distance of the graph as traced with moved weights, once that has run."""
    seconds: float = 0.0
    """The time that the last run of a graph has taken."""

    def compare(
        self,
        joint: JointStep,
        run: Runnable,
        *,
        rehearses: bool = False,
        plain: Callable[[], JointStep] | None = None,
    ) -> None:
        """Run a joint step from the state before eager code ran; raise CannotTrace if it differs.

        A graph as traced draws what eager code has drawn, except in attention, whose kernels may be
        others. A compiled one draws other numbers: it runs, but there is nothing to compare.
        `plain` makes the graph as traced, for models that amplify rounding.
        """
        done, traced = self.done, joint.traced
        # The trial run writes into the buffers: save the window's gradients first.
        held = self.gradients.set_aside(joint.used)
        draws_alike = not joint.compiled and not traced.draws_in_attention
        try:
            results = self._results(joint, run, rehearses=rehearses)
            if traced.random and not draws_alike:
                return
            allowed = _allowed(done.results[0].dtype, traced.sixteen_bit, compiled=joint.compiled)
            _hold_against(results, done.results, "loss", allowed)
            wanted = done.gradients(joint.used, held)
            if wanted is None:
                return
            if not 0.0 < _norm(wanted) < math.inf:
                raise NothingToCompare
            buffers = self.gradients.of(joint.used)
            if traced.sixteen_bit and plain is not None:
                above = _distance(buffers, wanted) / _norm(wanted)
                if above > allowed:
                    allowed = max(allowed, 2 * self._own_distance(plain(), wanted))
                    _hold_to(above, "gradient", allowed)
                    return
            _hold_against(buffers, wanted, "gradient", allowed)
        finally:
            self.gradients.put_in_place(joint.used, held)

    def _results(self, joint: JointStep, run: Runnable, *, rehearses: bool) -> list[Tensor]:
        """Run the step into empty buffers; return its totals, and what it hands back."""
        done, device = self.done, self.seeds[0].device
        self.casts.refresh()

        def results() -> list[Tensor]:
            done.before.restore()
            torch._foreach_zero_(self.gradients.of(joint.used))
            totals, rest = run(done.inputs, self.seeds)
            return done.form.read(totals, rest).comparable

        began = time.perf_counter()
        found = rehearse(results, device, captures=rehearses)
        wait_for(device)
        self.seconds = time.perf_counter() - began
        return found

    def _own_distance(self, plain: JointStep, wanted: Sequence[Tensor]) -> float:
        """Return how far the gradient moves with weights that rounding has moved.

        Some models amplify rounding by any amount: BatchNorms, untrained.
        """
        if self._rounding is None:
            try:
                with weights_moved(plain.traced.trained):
                    self._results(plain, plain, rehearses=False)
                buffers = self.gradients.of(plain.used)
                self._rounding = _distance(buffers, wanted) / _norm(wanted)
            finally:
                self.casts.refresh()
        return self._rounding


def _allowed(dtype: torch.dtype, sixteen_bit: bool, *, compiled: bool) -> float:
    """Return the relative distance that rounding explains.

    The operations of a graph as traced are those of eager code. A compiler rounds otherwise, and an
    ill-conditioned model amplifies that.
    """
    if sixteen_bit:
        return 0.1 if compiled else 0.02
    return 1e-6 if dtype is torch.float64 else 1e-2


@torch.no_grad()
def _hold_against(
    actual: Sequence[Tensor], wanted: Sequence[Tensor], what: str, allowed: float
) -> None:
    """Raise CannotTrace if the results of a graph differ from those of eager code."""
    if len(actual) != len(wanted):
        raise CannotTrace(
            f"it gives {len(actual)} tensors of {what} where eager code gives {len(wanted)}"
        )
    below = _norm(wanted)
    if 0.0 < below < math.inf:
        _hold_to(_distance(actual, wanted) / below, what, allowed)


def _hold_to(distance: float, what: str, allowed: float) -> None:
    if not distance <= allowed:
        raise CannotTrace(f"its {what} differs from that of eager code by {distance:.1e}")


@contextlib.contextmanager
def weights_moved(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Move the weights by one rounding step of bf16, or not, at random, within this context.

    One bit of each is turned, and turned back: no copy is made.
    """
    _turn_last_bits(parameters)
    try:
        yield
    finally:
        _turn_last_bits(parameters)


_LAST_BIT = {
    torch.float32: (torch.int32, 1 << 16),
    torch.bfloat16: (torch.int16, 1),
    torch.float16: (torch.int16, 1 << 3),
}
"""Of bfloat16, in each of these dtypes."""


def _turn_last_bits(parameters: Sequence[nn.Parameter]) -> None:
    generators: dict[torch.device, torch.Generator] = {}
    for weight in parameters:
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
    """Return the norm of the difference, computed pair by pair on the device of `actual`."""
    return _norm(a.to(b.dtype) - b.to(a.device) for a, b in zip(actual, wanted, strict=True))


def _norm(tensors: Iterable[Tensor]) -> float:
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    return float(torch.stack(norms).norm())
