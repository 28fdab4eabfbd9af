"""A few numbers of each gradient, to compare gradients without keeping them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from wholebatch.window.autograd_graph import refuse_reentrant
from wholebatch.window.precision import SIXTEEN_BIT
from wholebatch.window.replaced_attributes import emptied

LINEAR = 3
"""So many numbers of a digest are linear in the gradient; the last is its norm."""


def gradient_digests(
    parameters: Sequence[nn.Parameter], totals: Sequence[Tensor], seeds: Sequence[Tensor]
) -> Tensor:
    """Return four numbers of each parameter's gradient: a float64 matrix on the host.

    Three are linear in the gradient (its sum, that of every other element, and its product with
    the parameter, divided by the parameter's size), the fourth is its norm. The backward starts
    from `seeds`. It leaves `.grad` and the user's hooks on parameters as they are: these run once
    per window, on the whole gradient.
    """
    sums: dict[int, Tensor] = {}

    def take(place: int, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # DDP's sink gives none to a parameter that this loss does not use
            return None
        digest = _digest(gradient.detach(), parameters[place].detach())
        sums[place] = sums[place] + digest if place in sums else digest
        if gradient.layout is not torch.strided:
            return None
        return gradient.new_zeros(()).expand_as(gradient)  # frees the gradient at once

    bare = [p for p in parameters if p._backward_hooks is None]
    with emptied(p._backward_hooks for p in parameters):
        trained = [p for p in parameters if p.requires_grad]  # one may be frozen in mid-window
        handles = [
            p.register_hook(partial(take, i)) for i, p in enumerate(parameters) if p.requires_grad
        ]
        try:
            refuse_reentrant(totals)
            torch.autograd.grad(list(totals), trained, list(seeds), allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
            for parameter in bare:  # an empty dictionary would be asked in every backward
                parameter._backward_hooks = None
    read = torch.zeros(len(parameters), LINEAR + 1, dtype=torch.float64)
    if sums:
        device = next(iter(sums.values())).device
        read[list(sums)] = torch.stack([digest.to(device) for digest in sums.values()]).cpu()
    return read


def _digest(gradient: Tensor, parameter: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    gradient = gradient.resolve_conj().resolve_neg()
    if gradient.is_complex():
        gradient, parameter = torch.view_as_real(gradient), torch.view_as_real(parameter)
    if gradient.dtype in SIXTEEN_BIT:
        gradient = gradient.float()
    flat, weights = gradient.reshape(-1), parameter.reshape(-1).to(gradient.dtype)
    # Divided by the parameter's size it is like a sum of random signs, as the others are.
    product = torch.dot(flat, weights) / weights.square().mean().sqrt().clamp_min(1e-30)
    return torch.stack([flat.sum(), flat[::2].sum(), product, flat.norm()]).double()


def gap_of(whole: Tensor, parts: Sequence[Tensor], tolerance: float) -> tuple[int, float] | None:
    """Return the parameter whose gradient adds up worst, and by how much; None if all do."""
    apart = torch.stack([*parts]).sum(0)
    if not (whole.isfinite().all() and apart.isfinite().all()):
        return None
    gaps = (whole - apart)[:, :LINEAR].abs()
    norms = torch.maximum(whole, apart)[:, LINEAR:]
    # A sum of numbers of one sign may be far above the norm, and so is its rounding.
    sums = torch.maximum(whole.abs(), apart.abs())[:, :LINEAR]
    sizes: Tensor = torch.maximum(norms, sums).clamp_min(1e-300)
    # A gradient that is zero but for rounding (the bias of a key in attention) says nothing.
    over = gaps > torch.maximum(tolerance * sizes, min(tolerance, 1e-3) * norms.norm())
    if not bool(over.any()):
        return None
    ratios = torch.where(over, gaps / sizes, 0.0).amax(1)
    worst = int(ratios.argmax())
    return worst, float(ratios[worst])
