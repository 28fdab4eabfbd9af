"""The memory of graphs: gradient buffers, casts of the weights, and the pool of recorded graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from wholebatch.compile.execute_mode import CannotTrace
from wholebatch.compile.gradient_buffers import Casts, Gradients, empty_cache, take_workspace

if TYPE_CHECKING:
    from wholebatch.window.ledger import Ledger


class GraphMemory:
    """The memory that the graphs of a run use together, and keep from window to window.

    A gradient buffer is laid out as its parameter: other parameters need other buffers (`fits`).
    """

    reserves_on: ClassVar[tuple[str, ...]] = ("cuda",)
    """Device types on which gradient memory is reserved before the first micro-step."""

    def __init__(self, model: nn.Module, window: Ledger, device: torch.device) -> None:
        self._model, self._window, self._device = model, window, device
        self._pool: Any = None
        self.reset([])

    def reset(self, trained: Sequence[nn.Parameter]) -> None:
        """Drop the buffers; new ones will be for these parameters."""
        self._parameters, self._layout = list(trained), _layout_of(trained)
        self.gradients, self.casts = Gradients([]), Casts([])

    def fits(self, trained: Sequence[nn.Parameter]) -> bool:
        """True if the buffers are, or will be, for these parameters as they are now."""
        return self._layout == _layout_of(trained)

    def prepare(self) -> None:
        """Prepare for the parameters of the window; raise CannotTrace if no graph can take them."""
        own = {id(parameter) for parameter in self._model.parameters()}
        for parameter in self._parameters:
            if type(parameter) is not nn.Parameter:
                raise CannotTrace(f"it trains a {type(parameter).__name__}")
            if id(parameter) not in own:
                raise CannotTrace("the optimizer has parameters that are not in the model")
        if len({parameter.device for parameter in self._model.parameters()}) > 1:
            raise CannotTrace("the model is on more than one device")
        if not self.gradients.parameters:
            self.gradients, self.casts = Gradients(self._parameters), Casts(self._parameters)

    def reserve(self) -> None:
        """Allocate the gradient buffers in one block before the first micro-step.

        Otherwise autograd would allocate the first gradients among the activations of its backward,
        and the optimizer its state beside them. Both would pin that memory for good.
        """
        if self._device.type not in self.reserves_on:
            return
        if self._window.updates or self.gradients.parameters:
            return
        empty_cache(self._device)  # The buffers must not fill gaps left by earlier work either.
        take_workspace(self._device)
        if not self._parameters:
            self.reset(self._window.target.trained())
        self.prepare()
        self.gradients.of(range(len(self.gradients.parameters)))
        sparse = any(getattr(module, "sparse", False) is True for module in self._model.modules())
        self.gradients.lends = self._window.lends_buffers and not sparse

    def settle(self) -> None:
        """Move the gradients into their buffers, and release cached memory."""
        if self._device.type in self.reserves_on:
            self.gradients.take_in()
            empty_cache(self._device)

    def pool(self, *, in_use: bool) -> Any:
        """Return the pool of recorded graphs; without a graph, an old one cannot be used again."""
        if self._pool is None or not in_use:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def drop_pool(self) -> None:
        self._pool = None


def _layout_of(parameters: Sequence[nn.Parameter]) -> list[Any]:
    return [(id(parameter), parameter.dtype, parameter.stride()) for parameter in parameters]
