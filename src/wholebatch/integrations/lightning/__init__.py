"""Exact windows in Lightning's Trainer and in loops over Fabric.

```python
trainer = Trainer(
    accumulate_grad_batches=4,
    gradient_clip_val=1.0,
    callbacks=[ExactWindows(units=lambda batch: (batch["labels"] != -100).sum())],
)
```

In a loop over Fabric, `FabricWindows.backward` takes the place of `fabric.backward`.
"""

from wholebatch.core.optional_packages import require

require("lightning", at_least="2.6", extra="lightning", purpose="wholebatch in Lightning")

from wholebatch.integrations.lightning.fabric import FabricWindows  # noqa: E402
from wholebatch.integrations.lightning.lightning_trainer import ExactWindows  # noqa: E402

__all__ = ["ExactWindows", "FabricWindows"]
