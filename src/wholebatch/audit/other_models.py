"""Another model that a loss depends on, and that is updated in the middle of a window."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

from torch import Tensor, nn

from wholebatch.audit.check import Check, LossOfMicroBatch, silenced
from wholebatch.window.autograd_graph import graph_nodes


class OtherModels(Check):
    """Warn of a parameter in the loss's graph that was written since an earlier loss.

    A GAN's critic has stepped, for example: the micro-batches do not see the same weights.
    """

    only_first = False

    def __init__(self) -> None:
        self._versions: dict[int, tuple[ref[Tensor], int]] = {}

    def window_begins(self) -> None:
        self._versions.clear()

    def loss_is_known(self, micro: LossOfMicroBatch) -> Iterable[str]:
        for node in graph_nodes([micro.loss]):
            leaf: Tensor | None = getattr(node, "variable", None)
            if not isinstance(leaf, nn.Parameter):
                continue
            known, version = self._versions.setdefault(id(leaf), (ref(leaf), leaf._version))
            if known() is leaf and version != leaf._version:
                begin = "a parameter of another model changed in the middle of a window"
                return [
                    f"{begin} (shape {tuple(leaf.shape)}): if its optimizer has stepped, the "
                    "micro-batches do not see the same weights. Give wb.over all accumulators of "
                    f"the loop, or each model a loop of its own; {silenced(begin)}"
                ]
        return []
