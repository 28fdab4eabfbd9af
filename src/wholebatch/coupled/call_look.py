"""Look at a call of a module: do its samples stay apart, and what does the forward move?

The loop of a user calls its model itself. What it gives to the first call is enough to make that
call again on a few samples and on their halves (`AddsUp`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from wholebatch.core.forward_state import ForwardState
from wholebatch.core.splitting.samples import flatten, layout_of
from wholebatch.coupled.adds_up import AddsUp, Look
from wholebatch.coupled.finding import Finding
from wholebatch.coupled.local_collectives import local_collectives
from wholebatch.errors import SplitError

__all__ = ["look_at_call", "tensors_of"]

_log = logging.getLogger("wholebatch")


def look_at_call(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Finding, ...] | None:
    """Return what couples the samples of this call, and the state that it moves.

    None: the call has one sample, and another may tell more. Every tensor that is given must have
    the same number of samples in its first dimension; else nothing is found. What is found must
    also be found where the second dimension is read as the samples, if that is possible: it may
    have been [time, samples, ...]. The module is left as it was.
    """
    given = tensors_of((args, kwargs))
    if given and all(len(tensor) == 1 for tensor in given):
        return None
    with _plain_autograd() as is_plain:
        look = _looked(_Call(module, args, kwargs, 0)) if is_plain else Look(told=False)
        if look.findings:
            turned = _looked(_Call(module, args, kwargs, 1))
            return () if turned.told and not turned.findings else look.findings
    return look.findings


def _looked(call: _Call) -> Look:
    if not call.has_samples():
        return Look(told=False)
    try:
        call.find_rows()
        with local_collectives():
            return AddsUp(call.module).look(call.run, call.batch, outputs=True, name="forward")
    except Exception as error:  # it cannot be called so: with fewer samples, or time as samples
        _log.debug("a call of %s was not looked at: %r", type(call.module).__name__, error)
        return Look(told=False)


@contextmanager
def _plain_autograd() -> Iterator[bool]:
    """Keep what a look saves for its backwards from a checkpoint or offload that is being made.

    False: a mode that sees every operation is active (a selective checkpoint), and would see ours.
    """
    private = torch._C._autograd
    hooks = []
    while (top := private._top_saved_tensors_default_hooks(True)) is not None:
        private._pop_saved_tensors_default_hooks()
        hooks.append(top)
    try:
        yield not _get_current_dispatch_mode_stack()
    finally:
        for pack, unpack in reversed(hooks):
            private._push_saved_tensors_default_hooks(pack, unpack)


class _Call:
    """A call that can be made again with fewer samples, which lie in dimension `dim`."""

    def __init__(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dim: int
    ) -> None:
        self.module = module
        self._dim = dim
        self._given = tensors_of((args, kwargs))
        self.batch = self._turned((tuple(args), dict(kwargs)))
        self._rows: set[str] | None = None  # the outputs that have a row for each sample

    def has_samples(self) -> bool:
        """True if all tensors have equally many samples, and more than one."""
        dims = [tensor.dim() > self._dim for tensor in self._given]
        sizes = {tensor.shape[self._dim] for tensor in self._given if tensor.dim() > self._dim}
        return bool(dims) and all(dims) and len(sizes) == 1 and sizes.pop() > 1

    def find_rows(self) -> None:
        """Call the module with different numbers of samples: an output has as many rows, or not."""
        size = self._given[0].shape[self._dim]
        layout = layout_of(self.batch, batch_size=size)
        numbers = (2, 3) if size > 2 else (1, 2)  # of one sample, a BatchNorm knows no variance
        before = ForwardState(self.module)
        try:
            with torch.no_grad():
                rows = [self._named(self.run(layout.take(list(range(n)))), n) for n in numbers]
        finally:
            before.restore()
        self._rows = rows[0] & rows[1]

    def run(self, few: Any) -> dict[str, Tensor]:
        """Call the module, and return the outputs that have a row for each sample."""
        args, kwargs = self._turned(few)
        leaves, _ = flatten(self._turned(self.module(*args, **kwargs)))
        tensors = {x.name: x.value for x in leaves if isinstance(x.value, Tensor) and x.value.dim()}
        return {n: t for n, t in tensors.items() if self._rows is None or n in self._rows}

    @staticmethod
    def _named(made: Mapping[str, Tensor], count: int) -> set[str]:
        return {name for name, tensor in made.items() if len(tensor) == count}

    def _turned(self, tree: Any) -> Any:
        """The same with samples first, or back: the two dimensions change places."""
        if self._dim == 0:
            return tree
        leaves, structure = flatten(tree)
        values = [leaf.value for leaf in leaves]
        return structure.build(
            [v.transpose(0, 1) if isinstance(v, Tensor) and v.dim() > 1 else v for v in values]
        )


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in a structure that have a dimension; none if it cannot be read."""
    try:
        leaves = [leaf.value for leaf in flatten(tree)[0]]
    except SplitError:
        return []
    return [value for value in leaves if isinstance(value, Tensor) and value.dim()]
