"""The plain window with its optimizer state in host memory between steps.

Gradients are in `.grad` as in the plain window, so clipping, hooks, `on_gradient=` and compiled
micro-steps see no difference. Only `optimizer.step()` runs bucket by bucket.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from wholebatch.errors import WindowError
from wholebatch.offload.partial_step import buckets_of, post_hooks_once, refuse_pre_hooks
from wholebatch.offload.streamed_state import StreamedState
from wholebatch.window.close import Store

OPTION = 'optimizer_state="host"'


class HostStateStore(Store):
    """Gradients in `.grad`; the optimizer's state in pinned host memory between steps."""

    def __init__(self, *run: Any, **options: Any) -> None:
        super().__init__(*run, **options)
        self._state = StreamedState()

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory that hold optimizer state."""
        return self._state.host_bytes

    def begin(self, parameters: list[nn.Parameter]) -> None:
        for optimizer in self.target.optimizers:
            refuse_pre_hooks(optimizer, OPTION)  # hooks may have been added since the last window
            self._state.move_to_host(optimizer)
        super().begin(parameters)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        with post_hooks_once(optimizer):
            self._state.step(optimizer, buckets_of(parameters))

    def check_hand_over(self) -> None:
        raise WindowError(
            f"gradient() with {OPTION}: your own optimizer.step() would find the state in host "
            "memory; use step(), or leave the option out"
        )
