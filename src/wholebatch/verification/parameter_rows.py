"""The parameters that are watched, and rows of their numbers: gradients, weights, contributions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.verification.distances import TIMES_THE_FLOOR, apart

_NUMBERS = 1 << 13
"""Numbers kept of a gradient; at least one of each parameter."""


class ParameterRows:
    """Takes every n-th number of the watched parameters, as rows in float64 on the host."""

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self.names: list[str] = []
        self.sizes: list[int] = []
        self.index: dict[int, int] = {}
        self.is_sharded = False
        self.has_foreign_hooks = False
        """True if the loop has hooks of its own, which change gradients before they are seen."""
        self._stride = 1
        self._hooks: dict[int, Any] = {}
        self._parts: dict[int, Tensor] | None = None

    def adopt(self, model: nn.Module) -> None:
        """Watch the parameters of a model from now on."""
        named = [(n, p) for n, p in model.named_parameters() if id(p) not in self.index]
        if not named:
            return
        names = {type(module).__name__ for module in model.modules()}
        self.is_sharded |= any(hasattr(p, "to_local") or not p.numel() for _, p in named)
        self.is_sharded |= any(name.startswith("FSDP") for name in names)
        if not self.parameters:
            self._stride = max(1, -(-sum(p.numel() for _, p in named) // _NUMBERS))
        for name, parameter in named:
            self.index[id(parameter)] = len(self.parameters)
            self.parameters.append(parameter)
            self.names.append(name)
            self.sizes.append(-(-parameter.numel() // self._stride))

    @contextmanager
    def contributions(self) -> Iterator[list[Tensor]]:
        """Yield a list that has, after the block, the row of what a backward has brought."""
        for index, parameter in enumerate(self.parameters):  # parts may be frozen in turn
            if parameter.requires_grad and index not in self._hooks:
                self.has_foreign_hooks |= bool(parameter._backward_hooks)
                self._hooks[index] = parameter.register_hook(partial(self._brings, index))
        brought: list[Tensor] = []
        parts: dict[int, Tensor] = {}
        self._parts = parts
        try:
            yield brought
        finally:
            self._parts = None
        brought.append(self._row([parts.get(i) for i in range(len(self.sizes))]))

    def remove_hooks(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _brings(self, index: int, gradient: Tensor | None) -> None:
        if self._parts is not None and gradient is not None:  # else somebody calls hooks by hand
            part = self._part(gradient).clone()  # it may become .grad, and be added to
            held = self._parts.get(index)
            self._parts[index] = part if held is None else held + part

    @torch.no_grad()
    def _part(self, tensor: Tensor) -> Tensor:
        dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        return dense.reshape(-1)[:: self._stride]

    def sample(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return whole tensors of the parameters as they are kept."""
        return self._row([None if tensor is None else self._part(tensor) for tensor in tensors])

    def gradients(self) -> Tensor:
        return self.sample([parameter.grad for parameter in self.parameters])

    def weights(self) -> Tensor:
        return self.sample(self.parameters)

    def _row(self, parts: Sequence[Tensor | None]) -> Tensor:
        rows = [
            p.new_zeros(size) if part is None else part.detach()
            for part, p, size in zip(parts, self.parameters, self.sizes, strict=True)
        ]
        if len({(row.device, row.dtype) for row in rows}) == 1:  # one copy to the host
            return torch.cat(rows).to("cpu", torch.float64)
        return torch.cat([row.to("cpu", torch.float64) for row in rows])

    def filled(self, row: Tensor) -> frozenset[int]:
        """Return the parameters whose part of a row is not zero."""
        parts = self._padded(row).split(self.sizes) if row.numel() else ()
        return frozenset(i for i, part in enumerate(parts) if bool(part.any()))

    def differing(self, was: Tensor, now: Tensor) -> frozenset[int]:
        """Return the parameters whose numbers have changed by more than rounding explains."""
        pairs = zip(
            self._padded(was).split(self.sizes), self._padded(now).split(self.sizes), strict=True
        )
        steps = [torch.finfo(p.dtype).eps for p in self.parameters]
        rows = enumerate(zip(pairs, steps, strict=True))  # in 16 bits every change is a large one
        return frozenset(
            i for i, ((a, b), eps) in rows if apart(b, a) > (eps < 1e-4) * TIMES_THE_FLOOR * eps
        )

    def _padded(self, row: Tensor) -> Tensor:
        """Return a row with zeros for parameters that were adopted after it was recorded."""
        return torch.cat([row, row.new_zeros(sum(self.sizes) - row.numel())])

    def selected(self, row: Tensor, indices: Sequence[int]) -> Tensor:
        """Return the numbers of a row that belong to these parameters."""
        parts = self._padded(row).split(self.sizes)
        return torch.cat([parts[i] for i in indices]) if indices else row[:0]
