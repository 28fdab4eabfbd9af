"""Exact windows in Transformers' Trainer and the trainers that descend from it (TRL's SFTTrainer).

```python
trainer = exact(Trainer)(model=model, args=args, train_dataset=data)       # was Trainer(...)
```
"""

from wholebatch.integrations.transformers.exact_trainer import ExactTrainerMixin, exact

__all__ = ["ExactTrainerMixin", "exact"]
