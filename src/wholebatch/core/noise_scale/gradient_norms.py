"""The norm of one micro-batch's gradient, measured before autograd adds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from wholebatch.core.precision import SIXTEEN_BIT

__all__ = ["Incoming"]

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
