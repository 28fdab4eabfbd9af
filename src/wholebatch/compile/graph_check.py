"""The check of a graph against eager code, on one of the user's micro-batches, before its use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.compile.execute_mode import CannotTrace
from wholebatch.compile.graph_inputs import Inputs
from wholebatch.compile.trace import Form
from wholebatch.losses.loss import as_loss, terms_of
from wholebatch.window.forward_state import ForwardState, replaced_attributes
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
    nearness: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None
    """The last two arguments of `is_as_near`, once they are known."""

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


def hold_against(
    found: Sequence[Tensor],
    wanted: Sequence[Tensor],
    what: str,
    *,
    sixteen_bit: bool,
    nearness: Callable[[], tuple[Sequence[Tensor], Sequence[Tensor]]] | None = None,
) -> None:
    """Raise CannotTrace if `found` of a graph differs from `wanted` by more than rounding.

    `sixteen_bit`: a part of the graph computes in 16 bit. `nearness` gives the last two arguments
    of `is_as_near`.
    """
    reason = differs(found, wanted, what, sixteen_bit=sixteen_bit)
    if reason is None:
        return
    if nearness is not None and sixteen_bit:
        with contextlib.suppress(torch.OutOfMemoryError):
            if is_as_near(found, *nearness()):
                return
    raise CannotTrace(reason)


@torch.no_grad()
def differs(
    found: Sequence[Tensor], wanted: Sequence[Tensor], what: str, *, sixteen_bit: bool
) -> str | None:
    """Return the reason why `found` differs from `wanted` by more than rounding, or None.

    The limits are wide: rounding differs between kernels, and an ill-conditioned model amplifies
    it. The check looks for a different function, which differs in the first digit.
    """
    if len(found) != len(wanted):
        return f"it gives {len(found)} tensors of {what} where eager code gives {len(wanted)}"
    dtype = wanted[0].dtype
    allowed = 0.1 if sixteen_bit else 1e-6 if dtype is torch.float64 else 1e-2
    above, below = _distance(found, wanted), _norm(wanted)
    if not 0.0 < below < float("inf") or above <= allowed * below:
        return None  # Or eager code is not finite, or there is nothing to compare.
    return f"its {what} differs from that of eager code by {above / below:.1e}"


@torch.no_grad()
def is_as_near(found: Sequence[Tensor], wanted: Sequence[Tensor], truth: Sequence[Tensor]) -> bool:
    """True if `found` is about as near to the truth as `wanted` is.

    In 16 bit, two equally good ways of rounding can change a deep model's gradients by a tenth, and
    those of an untrained model with BatchNorms altogether. Where eager code itself is that far from
    the truth, no tensor of `found` may be much farther, or much smaller than both.
    """
    distance = 1.25 * _distance(wanted, truth)
    if not _distance(found, truth) <= distance:  # Not a number, or farther.
        return False
    return distance < _norm(truth) or all(
        _distance([a], [c]) <= 4 * _distance([b], [c]) + 0.1 * _norm([c])
        and _norm([a]) >= 0.5 * min(_norm([b]), _norm([c]))
        for a, b, c in zip(found, wanted, truth, strict=True)
    )


def gradients_of(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    micro: Any,
    parameters: Sequence[nn.Parameter],
    seeds: Sequence[Tensor],
    forward: contextlib.AbstractContextManager[object],
) -> list[Tensor]:
    """Return the gradients of a micro-batch, by eager code with this context for its forward."""
    with torch.enable_grad():
        with forward:
            terms = terms_of(as_loss(loss(model, micro)))
        totals = [term.total for term in terms.values()]
        found = torch.autograd.grad(
            totals,
            list(parameters),
            [seed.to(total.dtype) for seed, total in zip(seeds, totals, strict=True)],
            materialize_grads=True,
            allow_unused=True,
        )
    return list(found)


@contextlib.contextmanager
def weights_moved(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Change every weight by 2^-8 of it, up or down at random, within this context.

    That is one unit in the last place of bf16: what eager code computes then differs by about as
    much as another order of rounding makes it differ.
    """
    kept = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator(parameters[0].device).manual_seed(0)
    try:
        with torch.no_grad():
            for one in parameters:
                up = torch.randint(2, one.shape, generator=generator, device=one.device)
                one.mul_(1 + 2**-8 * (2 * up - 1))
        yield
    finally:
        with torch.no_grad():
            for parameter, numbers in zip(parameters, kept, strict=True):
                parameter.copy_(numbers)


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Keep autocast off within this context, also where the model switches it on by itself."""
    with (
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        replaced_attributes(torch, set_autocast_enabled=lambda *_: None),
    ):
        yield


def _distance(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Return the norm of the difference, computed pair by pair on the device of `found`."""
    return _norm(a.to(b.dtype) - b.to(a.device) for a, b in zip(found, wanted, strict=True))


def _norm(tensors: Iterable[Tensor]) -> float:
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    return float(torch.stack(norms).norm())
