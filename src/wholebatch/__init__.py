"""Exact gradient accumulation: the update of the whole batch in the memory of a micro-batch.

```python
import wholebatch as wb

# You have the whole batch: pass it, get the update.
train = wb.WholeBatch(model, optimizer, loss=loss_fn, micro_batch=8, clip_norm=1.0)
for batch in loader:
    step = train.step(batch)

# You have a loop of your own over micro-batches: keep its loss, and say what it is a mean over.
acc = wb.Accumulator(model, optimizer, steps=8, clip_norm=1.0)
for micro in acc.over(loader):
    loss = F.cross_entropy(model(micro["x"]), micro["y"])
    step = acc.backward(mean=loss, units=len(micro["y"]))
```

Names are loaded when first used, so `import wholebatch` alone does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wholebatch import errors as errors
    from wholebatch import losses as losses
    from wholebatch.accumulator import Accumulator as Accumulator
    from wholebatch.accumulator import over as over
    from wholebatch.batch import split as split
    from wholebatch.batch import tokens as tokens
    from wholebatch.batch.lookahead_loader import unpadded as unpadded
    from wholebatch.losses.causal_lm import causal_lm as causal_lm
    from wholebatch.losses.coupled import Coupled as Coupled
    from wholebatch.losses.loss import Loss as Loss
    from wholebatch.losses.loss import cross_entropy as cross_entropy
    from wholebatch.losses.loss import mean_loss as mean_loss
    from wholebatch.losses.moe import moe_loss as moe_loss
    from wholebatch.losses.sliced_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from wholebatch.options import Close as Close
    from wholebatch.options import Memory as Memory
    from wholebatch.options import samples as samples
    from wholebatch.pipeline import Pipeline as Pipeline
    from wholebatch.verification import verify as verify
    from wholebatch.verification import watch as watch
    from wholebatch.whole_batch import WholeBatch as WholeBatch
    from wholebatch.window.steps import by_epoch as by_epoch
    from wholebatch.window.steps import updates_per_epoch as updates_per_epoch
    from wholebatch.window.window import Step as Step

__version__ = "0.1.0"

# The names of each module; a submodule stands for itself. A test holds this table and the imports
# for type checkers above to the same names.
_NAMES = {
    "accumulator": "Accumulator over",
    "batch": "split tokens",
    "batch.lookahead_loader": "unpadded",
    "losses.causal_lm": "causal_lm",
    "losses.coupled": "Coupled",
    "losses.moe": "moe_loss",
    "losses.sliced_cross_entropy": "linear_cross_entropy",
    "errors": "errors",
    "losses": "losses",
    "losses.loss": "Loss cross_entropy mean_loss",
    "options": "Close Memory samples",
    "pipeline": "Pipeline",
    "verification": "verify watch",
    "whole_batch": "WholeBatch",
    "window.steps": "by_epoch updates_per_epoch",
    "window.window": "Step",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_HOMES, "__version__"])


if not TYPE_CHECKING:  # a type checker that saw this would believe any name exists

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f"{__name__}.{home}")
        value = module if home == name else getattr(module, name)
        globals()[name] = value  # the next access does not come here
        return value


def __dir__() -> list[str]:
    return [*__all__]
