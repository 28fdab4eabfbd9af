"""Layers that no micro-batch can compute for the batch."""

from __future__ import annotations

from collections.abc import Iterable

from wholebatch.audit.check import Answer, Check, MicroBatch
from wholebatch.audit.layers import refused_by_type


class CouplingLayers(Check):
    """Layers that no micro-batch can compute for the batch.

    Finds: embeddings that scale their gradient by the rows of the micro-batch
    (`scale_grad_by_freq`).

    Costs: one look at every module of the models, per micro-batch.

    Certain: their gradient is defined by the batch that they get.

    Cannot see: such a layer of your own, which `FirstCall` finds where its output shows it.
    """

    def micro_batch(self, micro: MicroBatch) -> Iterable[Answer]:
        return [finding for model in micro.models for finding in refused_by_type(model)]
