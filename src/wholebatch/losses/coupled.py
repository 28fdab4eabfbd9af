"""Coupled: a loss over all samples of a batch at once.

A contrastive loss compares every sample with every other. `Coupled` splits it into two functions:
`encode` turns a micro-batch into representations, and `loss` turns those of the whole batch into a
Loss. The two-pass runner then needs memory for one micro-batch's graph and all representations.

```python
def encode(model, micro):
    return {"image": model.image(micro["image"]), "text": model.text(micro["text"])}

def loss(all):
    return wb.losses.clip_loss(all["image"], all["text"], scale=model.logit_scale.exp())

train = wb.WholeBatch(model, optimizer, loss=wb.Coupled(encode, loss), micro_batch=256)
```
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

from torch import Tensor

from wholebatch.errors import OptionError
from wholebatch.losses.loss import Loss, Terms


@dataclass(frozen=True, slots=True)
class Coupled:
    """A loss that compares all samples of the batch, such as a contrastive loss.

    `encode` runs twice on every micro-batch, with the same random numbers. Parameters that only
    `loss` uses (a temperature) get their gradient too.

    Before the first split window, the rows of `encode` are compared with those of fewer samples.

    Args:
        encode: A function `encode(model, micro)` that returns the representations of a
            micro-batch and what else the loss needs: a tensor, or a dict, tuple or list of tensors.
        loss: A function `loss(all)` of the same structure, with every tensor concatenated over the
            whole batch, or `loss(model, all)`. It returns a `Loss`.
        tolerance: The largest relative difference between both runs of `encode`.
        keep: The number of last micro-batches that are encoded only once; their graphs are kept.
        addends: A function `addends(model, micro)`, where `encode` returns sums over the
            micro-batch: it returns a Loss of them, and its totals are compared instead.
    """

    encode: Callable[[Any, Any], Any]
    loss: Callable[..., Loss | Terms | Tensor]
    tolerance: float | None = None
    keep: int = 1
    addends: Callable[[Any, Any], Loss | Terms] | None = None

    def __post_init__(self) -> None:
        for name in ("encode", "loss"):
            if not callable(getattr(self, name)):
                raise OptionError(f"Coupled({name}=...): must be a function")
        is_number = isinstance(self.keep, int) and not isinstance(self.keep, bool)
        if not (is_number and self.keep >= 0):
            raise OptionError(
                f"Coupled(keep={self.keep!r}): must be a number of micro-batches, 0 or more"
            )
        if self.tolerance is not None and self.tolerance < 0:
            raise OptionError(f"Coupled(tolerance={self.tolerance}): must not be negative")

    def __call__(self, model: Any, batch: Any) -> Loss | Terms | Tensor:
        """Return the loss of an undivided batch, with the graphs of all its samples."""
        return self.of_all(model, self.encode(model, batch))

    def of_all(self, model: Any, representations: Any) -> Loss | Terms | Tensor:
        """Return the loss of the representations of a whole batch."""
        return (
            self.loss(model, representations) if self._takes_model() else self.loss(representations)
        )

    def _takes_model(self) -> bool:
        try:
            parameters = signature(self.loss).parameters.values()
        except (TypeError, ValueError):  # a function of C without a signature
            return False
        kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        return sum(p.kind in kinds and p.default is Parameter.empty for p in parameters) == 2
