"""Gradients told by a few numbers each, so that no copy of them is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from wholebatch.core.backward import is_reentrant
from wholebatch.core.close import DeferredHooks
from wholebatch.core.precision import SIXTEEN_BIT

__all__ = ["gradient_digests"]

LINEAR = 3
"""So many numbers of a digest are linear in the gradient; the last is its norm."""


def gradient_digests(
    parameters: Sequence[nn.Parameter], totals: Sequence[Tensor], seeds: Sequence[Tensor]
) -> Tensor:
    """Return the digest of each parameter's gradient: a float64 matrix on the host.

    Three numbers are linear in the gradient (its sum, that of every other element, and its product
    with the parameter), the fourth is its norm. The backward starts from `seeds`. It leaves `.grad`
    and the user's hooks as they are: these run once per window, on the whole gradient.
    """
    sums: dict[int, Tensor] = {}

    def hook(place: int, parameter: nn.Parameter) -> Callable[[Tensor], Tensor | None]:
        def digest(gradient: Tensor) -> Tensor | None:
            with _disable_current_modes():  # they would be asked for each of these operations
                made = _digest(gradient.detach(), parameter.detach())
                sums[place] = sums[place] + made if place in sums else made
                if gradient.layout is not torch.strided:
                    return None
                return gradient.new_zeros(()).expand_as(gradient)  # frees the gradient at once

        return digest

    with _without_hooks(parameters):
        bare = [p for p in parameters if p._backward_hooks is None]
        handles = [p.register_hook(hook(i, p)) for i, p in enumerate(parameters)]
        try:
            if is_reentrant(totals):  # its checkpoints refuse autograd.grad
                with _gradients_kept(parameters):
                    torch.autograd.backward(list(totals), list(seeds))
            else:
                torch.autograd.grad(list(totals), parameters, list(seeds), allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
            for parameter in bare:  # an empty dictionary would be asked in every backward
                parameter._backward_hooks = None
    read = torch.zeros(len(parameters), LINEAR + 1, dtype=torch.float64)
    if sums:
        device = next(iter(sums.values())).device
        read[list(sums)] = torch.stack([made.to(device) for made in sums.values()]).cpu()
    return read


def _digest(gradient: Tensor, parameter: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.is_complex():
        gradient, parameter = torch.view_as_real(gradient), torch.view_as_real(parameter)
    if gradient.dtype in SIXTEEN_BIT:
        gradient = gradient.float()
    flat, weights = gradient.reshape(-1), parameter.reshape(-1).to(gradient.dtype)
    made = (flat.sum(), flat[::2].sum(), torch.dot(flat, weights), flat.norm())
    return torch.stack(made).double()


@contextmanager
def _without_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Take off the user's hooks of parameters, of both kinds."""
    hooks = DeferredHooks()
    hooks.take(parameters)
    # Autograd holds the dictionary itself, so it is emptied and filled again.
    found = [p._post_accumulate_grad_hooks for p in parameters]
    after: list[tuple[dict[int, Any], dict[int, Any]]] = [(own, dict(own)) for own in found if own]
    for own, _ in after:
        own.clear()
    try:
        yield
    finally:
        hooks.give_back()
        for own, taken in after:
            own.update(taken)


@contextmanager
def _gradients_kept(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    held = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, held, strict=True):
            parameter.grad = gradient
