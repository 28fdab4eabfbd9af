"""The norm of one micro-batch's gradient, taken where autograd hands it over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

__all__ = ["Incoming"]

_HELD_BYTES = 32 * 2**20
"""Gradients are looked at in groups, as one kernel for many; no more than this waits for it."""

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


class Incoming:
    """Sees every gradient just before it is added to `.grad`, and keeps only norms.

    The hooks are on autograd's own accumulating nodes, so they are not among the user's hooks on
    the parameters, which a window takes off.
    """

    def __init__(self) -> None:
        self._nodes: list[Any] = []  # held: a node that nothing holds would be made anew
        self._handles: list[Any] = []
        self._held: list[Tensor] = []
        self._bytes = 0
        self._norms: list[Tensor] = []

    def attach(self, parameters: Sequence[nn.Parameter]) -> None:
        """Look at these parameters' gradients until `detach`."""
        self.detach()
        for parameter in parameters:
            node: Any = get_gradient_edge(parameter).node
            self._nodes.append(node)
            self._handles.append(node.register_prehook(self._see))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes, self._held, self._norms = [], [], [], []
        self._bytes = 0

    @torch.no_grad()
    def _see(self, gradients: tuple[Tensor | None, ...]) -> None:
        [gradient] = gradients
        if gradient is None:
            return
        gradient = gradient.detach()
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient)
        self._held.append(gradient)
        self._bytes += gradient.nbytes
        if self._bytes > _HELD_BYTES:
            self._look()

    def _look(self) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for gradient in self._held:
            kinds.setdefault((gradient.dtype, gradient.device), []).append(gradient)
        for (dtype, _), alike in kinds.items():
            wide = torch.float32 if dtype in _SIXTEEN_BIT else None
            self._norms.append(torch.stack(torch._foreach_norm(alike, 2, wide)))
        self._held, self._bytes = [], 0

    @torch.no_grad()
    def take(self) -> Tensor | None:
        """The norm over all that came since the last time; None where nothing did."""
        self._look()
        if not self._norms:
            return None
        device = self._norms[0].device
        norms = [torch.linalg.vector_norm(norm.double()).to(device) for norm in self._norms]
        self._norms = []
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
