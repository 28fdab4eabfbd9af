"""Exact gradient accumulation in Transformers' Trainer and TRL's trainers.

```python
trainer = exact(Trainer)(model=model, args=args, train_dataset=data)       # was Trainer(...)
```
"""

from wholebatch.optional_packages import require

require("transformers", at_least="5.17", extra="transformers", purpose="wholebatch in Transformers")

from wholebatch.integrations.transformers.exact_class import exact  # noqa: E402
from wholebatch.integrations.transformers.exact_trainer import ExactTrainerMixin  # noqa: E402

__all__ = ["ExactTrainerMixin", "exact"]
