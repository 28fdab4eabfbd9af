"""The host's sums as the graph of a micro-step sees them: buffers that its gradients are added to.

A graph hands each gradient over by an operation (`leave`) as soon as it is made; in a CUDA graph
the transfers are recorded with it. What a graph holds for a sum is a token, a small tensor of the
device. A flag on the device tells the first graph of a window to drop the sums that it finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wholebatch.offload.parameter_buckets import flat_of, in_shape_of
from wholebatch.offload.transfer_to_host import CudaTransfer, HostTransfer

if TYPE_CHECKING:
    from wholebatch.offload.host_store import HostStore

_APART = 64
"""The distance of two tokens, in elements: compiled code expects aligned inputs."""
_receiving: list[GraphSums] = []
"""The sums of the graph that runs now."""


@cache
def leave() -> Any:
    """Return the op `(token, gradient)`, which hands a gradient over to the host's sums."""

    @torch.library.custom_op("wholebatch::leave", mutates_args=("token",))
    def operation(token: Tensor, gradient: Tensor) -> None:
        _receiving[-1].receive(token, gradient)

    @operation.register_fake
    def _(token: Tensor, gradient: Tensor) -> None:
        return

    del _
    return torch.ops.wholebatch.leave.default


class GraphSums:
    """Stands for the gradient buffers of graphs (`compile.gradient_buffers.Gradients`)."""

    lends = False
    leaves = True

    def __init__(
        self,
        store: HostStore,
        parameters: Sequence[nn.Parameter],
        transfer: HostTransfer | CudaTransfer,
    ) -> None:
        self.parameters = list(parameters)
        self._store = store
        self._transfer = transfer
        device = self.parameters[0].device
        tokens = torch.zeros(len(self.parameters), _APART, device=device)
        self._tokens = [row[:1] for row in tokens]
        self._of_token = {
            token.data_ptr(): parameter
            for token, parameter in zip(self._tokens, self.parameters, strict=True)
        }
        self._drops = False
        self._drop = torch.zeros((), dtype=torch.bool, device=device)
        self._norms: dict[int, list[Tensor]] = {}
        self._norms_of: dict[int, dict[int, list[Tensor]]] = {}  # by the graph's id
        self._bytes_of: dict[int, int] = {}

    # Buffers

    def inputs(self, used: Sequence[int]) -> list[Tensor]:
        """Return the inputs of a graph that stand for these parameters' sums."""
        return [self._tokens[index] for index in used]

    def of(self, used: Sequence[int]) -> list[Tensor]:
        """Return these parameters' sums, in their shapes."""
        sums = self._store.drained()
        some = [self.parameters[index] for index in used]
        return [in_shape_of(parameter, sums.flat(parameter)) for parameter in some]

    def are_in_place(self, used: tuple[int, ...]) -> bool:
        """True if the next graph may add to the sums as they are."""
        filled = self._store.sums.filled
        return not self._drops and all(id(self.parameters[index]) in filled for index in used)

    def put_in_place(self, used: tuple[int, ...]) -> None:
        """Let the next graph add to these sums, or drop them if the window has none yet."""
        filled = self._store.sums.filled
        missing = [index for index in used if id(self.parameters[index]) not in filled]
        self._drops = len(missing) == len(used)
        self._drop.fill_(self._drops)
        if missing and not self._drops:
            for total in self.of(missing):
                total.zero_()
        filled.update(id(self.parameters[index]) for index in used)

    def zero(self, used: Sequence[int]) -> None:
        """Let the next graph begin with sums of zero."""
        self._drops = True
        self._drop.fill_(True)

    def set_aside(self, used: Sequence[int]) -> list[Tensor | None]:
        """Return copies of these sums; None for a parameter that has none in this window."""
        filled = self._store.sums.filled
        return [
            total.clone() if id(self.parameters[index]) in filled else None
            for index, total in zip(used, self.of(used), strict=True)
        ]

    def in_all(self) -> list[Tensor | None]:
        """Return copies of every parameter's sum."""
        return self.set_aside(range(len(self.parameters)))

    def put_back(self, used: tuple[int, ...], held: Sequence[Tensor | None]) -> None:
        """Copy `held` (zero where None) into these sums."""
        self.put_in_place(used)
        for total, numbers in zip(self.of(used), held, strict=True):
            total.zero_() if numbers is None else total.copy_(numbers)
        self._drops = False
        self._drop.fill_(False)

    def take_in(self) -> None:
        """Do nothing: gradients of eager code are in the sums already."""

    # Graphs

    @contextmanager
    def around(self, graph: object) -> Iterator[None]:
        """Bring the transfers of eager code and those of a graph that runs now in order."""
        transfer = self._transfer
        if not isinstance(transfer, CudaTransfer):
            yield
            return
        transfer.backward_made()
        transfer.join()
        before = transfer.bytes_out
        yield
        transfer.fork()
        if transfer.bytes_out == before:  # a replay
            transfer.bytes_out += self._bytes_of[id(graph)]
        self._store.norms = self._norms_of[id(graph)]

    @contextmanager
    def within(self, graph: object) -> Iterator[None]:
        """Take over the gradients of a graph that runs, or is captured, in this context."""
        self._norms = self._norms_of[id(graph)] = {}
        _receiving.append(self)
        try:
            before = self._transfer.bytes_out
            with self._transfer.from_graph(self._drop):
                yield
            self._bytes_of[id(graph)] = self._transfer.bytes_out - before
        finally:
            _receiving.pop()

    def receive(self, token: Tensor, gradient: Tensor) -> None:
        """Take over a gradient."""
        parameter = self._of_token[token.data_ptr()]
        flat = flat_of(gradient, parameter)
        total = self._store.sums.flat(parameter)
        norms = self._norms[total.data_ptr()] = []
        self._transfer.put(flat, total, first=False, norms=norms)
