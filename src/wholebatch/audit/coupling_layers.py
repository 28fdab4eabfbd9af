"""Layers that no micro-batch can compute for the batch."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from wholebatch.audit.check import Check
from wholebatch.errors import UnsupportedError


class CouplingLayers(Check):
    """Layers that no micro-batch can compute for the batch.

    Finds: embeddings that scale their gradient by the rows of the micro-batch
    (`scale_grad_by_freq`).

    Costs: one look at every module of the models.

    Raises: their gradient is defined by the batch that they get.

    Cannot see: such a layer of your own.
    """

    def window_begins(self, models: Iterable[nn.Module]) -> Iterable[str]:
        for model in models:
            for name, module in model.named_modules():
                if getattr(module, "scale_grad_by_freq", False):
                    raise UnsupportedError(
                        f"{name or type(module).__name__} has scale_grad_by_freq=True: it divides "
                        "gradients by the number of rows in the micro-batch, not in the batch; "
                        "leave it out"
                    )
        return ()
