"""Train on the whole batch in the memory of a slice: the same update.

```python
import wholebatch as wb

# You have the whole batch: give it, get the update.
train = wb.WholeBatch(model, optimizer, loss=loss_fn, micro_batch=8, clip_norm=1.0)
for batch in loader:
    step = train.step(batch)

# You have a loop of your own over micro-batches: change one line.
acc = wb.Accumulator(model, optimizer, steps=8, clip_norm=1.0)
for micro in acc.over(loader):
    total = F.cross_entropy(model(micro["x"]), micro["y"], reduction="sum")
    step = acc.backward(total, units=micro["y"].numel())
```

Names are loaded when first used, so `import wholebatch` alone does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wholebatch import errors as errors
    from wholebatch.accumulator import Accumulator
    from wholebatch.coupled import Coupled, clip_loss, info_nce, siglip_loss, supcon_loss
    from wholebatch.coupled.audit import audit
    from wholebatch.driving import over
    from wholebatch.engine import WholeBatch
    from wholebatch.loss import Loss, causal_lm, cross_entropy, mean_loss
    from wholebatch.proof import verify
    from wholebatch.runners.pipeline import Pipeline
    from wholebatch.splitting import split, tokens, unpadded
    from wholebatch.step import Step
    from wholebatch.steps import by_epoch

__version__ = "0.1.0"

__all__ = [
    "Accumulator",
    "Coupled",
    "Loss",
    "Pipeline",
    "Step",
    "WholeBatch",
    "__version__",
    "audit",
    "by_epoch",
    "causal_lm",
    "clip_loss",
    "cross_entropy",
    "errors",
    "info_nce",
    "mean_loss",
    "over",
    "siglip_loss",
    "split",
    "supcon_loss",
    "tokens",
    "unpadded",
    "verify",
]

# Where each name lives; a submodule stands for itself. A test holds this table, `__all__` and the
# imports for type checkers above to the same names.
_HOMES = {
    "Accumulator": "accumulator",
    "Coupled": "coupled",
    "Loss": "loss",
    "Pipeline": "runners.pipeline",
    "Step": "step",
    "WholeBatch": "engine",
    "audit": "coupled.audit",
    "by_epoch": "steps",
    "causal_lm": "loss",
    "clip_loss": "coupled",
    "cross_entropy": "loss",
    "errors": "errors",
    "info_nce": "coupled",
    "mean_loss": "loss",
    "over": "driving",
    "siglip_loss": "coupled",
    "split": "splitting",
    "supcon_loss": "coupled",
    "tokens": "splitting",
    "unpadded": "splitting",
    "verify": "proof",
}


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
    return sorted({*globals(), *__all__})
