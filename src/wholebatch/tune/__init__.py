"""Find the fastest settings for a batch on this machine, and if accumulating is worth it.

```python
from wholebatch.tune import Task, tune

found = tune(Task(build, loss, batches), memory="20GiB", precisions=("full", "bf16"))
print(*found.advice, sep="\\n")
```
"""

from wholebatch.tune.learning_rate import RangeTest, range_test
from wholebatch.tune.noise_scale import NoiseProbe, NoiseScale
from wholebatch.tune.task import Task
from wholebatch.tune.tuning import Setting, Trial, Tuned, tune

__all__ = [
    "NoiseProbe",
    "NoiseScale",
    "RangeTest",
    "Setting",
    "Task",
    "Trial",
    "Tuned",
    "range_test",
    "tune",
]
