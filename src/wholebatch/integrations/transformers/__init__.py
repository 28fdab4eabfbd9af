"""Exact windows in Transformers' Trainer and the trainers that descend from it (TRL's SFTTrainer).

```python
trainer = exact(Trainer)(model=model, args=args, train_dataset=data)       # was Trainer(...)
```
"""

from wholebatch.optional_packages import require

require("transformers", at_least="5.17", extra="transformers", purpose="wholebatch in Transformers")

from wholebatch.integrations.transformers.exact_class import exact  # noqa: E402
from wholebatch.integrations.transformers.exact_trainer import ExactWindows  # noqa: E402

__all__ = ["ExactWindows", "exact"]
