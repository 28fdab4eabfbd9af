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
    from wholebatch.accumulator import Accumulator, by_epoch, over
    from wholebatch.batch import split, tokens
    from wholebatch.batch.lookahead_loader import unpadded
    from wholebatch.coupled.audit import audit
    from wholebatch.coupled.contrastive.losses import (
        Coupled,
        clip_loss,
        info_nce,
        siglip_loss,
        supcon_loss,
    )
    from wholebatch.distributed.pipeline import Pipeline
    from wholebatch.losses.distillation import distillation_loss
    from wholebatch.losses.loss import Loss, causal_lm, cross_entropy, mean_loss
    from wholebatch.losses.moe import moe_loss
    from wholebatch.losses.policy import (
        aggregate,
        aggregate_units,
        group_sizes,
        policy_loss,
        token_kl,
        value_loss,
    )
    from wholebatch.losses.preference import (
        dpo_loss,
        ipo_loss,
        kto_loss,
        orpo_loss,
        reward_loss,
        sequence_logprobs,
        simpo_loss,
    )
    from wholebatch.options import Close, Memory, samples
    from wholebatch.verification import verify, watch
    from wholebatch.whole_batch import WholeBatch
    from wholebatch.window.window import Step

__version__ = "0.1.0"

__all__ = [
    "Accumulator",
    "Close",
    "Coupled",
    "Loss",
    "Memory",
    "Pipeline",
    "Step",
    "WholeBatch",
    "__version__",
    "aggregate",
    "aggregate_units",
    "audit",
    "by_epoch",
    "causal_lm",
    "clip_loss",
    "cross_entropy",
    "distillation_loss",
    "dpo_loss",
    "errors",
    "group_sizes",
    "info_nce",
    "ipo_loss",
    "kto_loss",
    "mean_loss",
    "moe_loss",
    "orpo_loss",
    "over",
    "policy_loss",
    "reward_loss",
    "samples",
    "sequence_logprobs",
    "siglip_loss",
    "simpo_loss",
    "split",
    "supcon_loss",
    "token_kl",
    "tokens",
    "unpadded",
    "value_loss",
    "verify",
    "watch",
]

# The names of each module; a submodule stands for itself. A test holds this table, `__all__` and
# the imports for type checkers above to the same names.
_NAMES = {
    "accumulator": "Accumulator by_epoch over",
    "batch.lookahead_loader": "unpadded",
    "losses.loss": "Loss causal_lm cross_entropy mean_loss",
    "options": "Close Memory samples",
    "batch": "split tokens",
    "whole_batch": "WholeBatch",
    "window.window": "Step",
    "coupled.audit": "audit",
    "coupled.contrastive.losses": "Coupled clip_loss info_nce siglip_loss supcon_loss",
    "losses.moe": "moe_loss",
    "distributed.pipeline": "Pipeline",
    "errors": "errors",
    "losses.distillation": "distillation_loss",
    "losses.policy": "aggregate aggregate_units group_sizes policy_loss token_kl value_loss",
    "losses.preference": (
        "dpo_loss ipo_loss kto_loss orpo_loss reward_loss sequence_logprobs simpo_loss"
    ),
    "verification": "verify watch",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}


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
