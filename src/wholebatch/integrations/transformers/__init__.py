"""Exact windows in Transformers' Trainer and the trainers that descend from it (TRL's SFTTrainer).

```python
trainer = exact(Trainer)(model=model, args=args, train_dataset=data)       # was Trainer(...)
```
"""

from wholebatch.integrations.transformers.exact import exact
from wholebatch.integrations.transformers.windows import ExactWindows

__all__ = ["ExactWindows", "exact"]
