"""A BatchNorm in training mode in a model that was not given."""

from __future__ import annotations

from wholebatch.audit.check import Answer, Check, MicroBatch, Warned, silenced


class ForeignBatchNorm(Check):
    """A BatchNorm in training mode in a model that was not given.

    Finds: a BatchNorm that runs in training mode during the window and is in no model of any
    accumulator: a teacher without `.eval()`, a projection head.

    Costs: a hook on every call of a module.

    Likely: nothing shows if the loss uses what it returned.

    Cannot see: any such model, in a program that uses `torch.compile`.
    """

    def micro_batch(self, micro: MicroBatch) -> Answer:
        if not micro.foreign_norms:
            return None
        begin = f"a {type(micro.foreign_norms[0]).__name__} in training mode"
        return Warned(
            f"{begin} is in no model that was given to wb.Accumulator. If the loss depends on it, "
            "it normalises with the statistics of the micro-batch: call .eval() on a model that is "
            f"not trained, or give it with the others (model=[net, head]); {silenced(begin)}"
        )
