"""A model whose samples act on each other, or whose forward changes state."""

from __future__ import annotations

from collections.abc import Iterable

from wholebatch.audit.check import Answer, Check, MicroBatch, Warned


class FirstCall(Check):
    """A model whose samples act on each other, or whose forward changes state.

    Finds: a first call of a model whose outputs are not those of two parts of its samples; state
    that the call changed (a running mean, a queue, a teacher).

    Costs: four forwards of one micro-batch, without gradients.

    Certain: both are computed on your data, with the same random numbers. One unit may own all rows
    of a micro-batch: there only state is refused. Likely where the rows may be no samples: a layer
    has `batch_first=False`, or another tensor has other rows.

    Cannot see: what shows only in later windows; a model that takes indices of other rows; a call
    that meets other ranks; state inside objects that are attributes.
    """

    def micro_batch(self, micro: MicroBatch) -> Iterable[Answer]:
        return [
            finding
            for finding in micro.first_calls
            if isinstance(finding, Warned)
            or micro.number != 1
            or finding.kind in ("state", "outside")
        ]
