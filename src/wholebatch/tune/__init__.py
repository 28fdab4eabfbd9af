"""Find the fastest settings for a batch on this machine, and if accumulating is worth it.

```python
from wholebatch.tune import Task, tune

found = tune(Task(build, loss, batches), memory="20GiB", precisions=("full", "bf16"))
print(*found.advice, sep="\\n")
```

Names are loaded when first used: the command line reads `tune.batch_scaling` without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wholebatch.tune.learning_rate import RangeTest as RangeTest
    from wholebatch.tune.learning_rate import range_test as range_test
    from wholebatch.tune.task import Task as Task
    from wholebatch.tune.tuning import Setting as Setting
    from wholebatch.tune.tuning import Trial as Trial
    from wholebatch.tune.tuning import Tuned as Tuned
    from wholebatch.tune.tuning import tune as tune

_HOMES = dict.fromkeys(("Setting", "Trial", "Tuned", "tune"), "tuning")
_HOMES |= {"RangeTest": "learning_rate", "range_test": "learning_rate", "Task": "task"}

if not TYPE_CHECKING:  # a type checker that saw this would believe any name exists

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
