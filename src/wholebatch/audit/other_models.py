"""Another model that a loss depends on, and that is updated in the middle of a window."""

from __future__ import annotations

from weakref import ref

from torch import Tensor

from wholebatch.audit.check import Answer, Check, MicroBatch, Refused
from wholebatch.errors import WindowError
from wholebatch.window.autograd_graph import graph_nodes


class OtherModels(Check):
    """Another model in the graph of the loss that is updated in the middle of a window.

    Finds: a leaf of the loss's graph (a GAN's critic) that was written since an earlier loss of the
    window.

    Costs: one walk over the graph of each loss.

    Certain: the micro-batches would not see the same weights.

    Cannot see: models that an engine shards; a write to `.data`; a model whose results are detached
    (a generator's fakes), without `wb.over`.
    """

    windows = "1, 2, 4, 8, …"

    def __init__(self) -> None:
        self._leaves: dict[int, tuple[ref[Tensor], int]] = {}

    def window_begins(self) -> Answer:
        self._leaves.clear()
        return None

    def micro_batch(self, micro: MicroBatch) -> Answer:
        if not micro.keeps_parameters:
            return None
        for node in graph_nodes([micro.loss]):
            leaf: Tensor | None = getattr(node, "variable", None)
            if leaf is None:
                continue
            known, version = self._leaves.setdefault(id(leaf), (ref(leaf), leaf._version))
            if known() is leaf and version != leaf._version:
                return Refused(
                    WindowError,
                    f"a parameter of shape {tuple(leaf.shape)} that this loss depends on has "
                    "changed in the middle of the window (another model's optimizer has stepped), "
                    "so the micro-batches would not see the same weights. Give wb.over all "
                    "accumulators of the loop, or each model a loop of its own; discard() drops "
                    "what this window holds",
                )
        return None
