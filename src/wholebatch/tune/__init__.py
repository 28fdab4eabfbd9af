"""Tuning: the fastest settings here, their bottleneck, and whether to accumulate at all.

```python
from wholebatch.tune import tune

found = tune(make, loss=loss, batch=batch, memory="20GiB", precisions=("full", "bf16"))
found.best.setting, found.advice, found.bottleneck
found.write(Path("tune.json"))          # wholebatch train --from tune.json
```
"""

from wholebatch.tune.bottleneck import Bottleneck
from wholebatch.tune.ranks_model import RanksModel, parse_bandwidth
from wholebatch.tune.search import Limits, SearchObserver
from wholebatch.tune.settings import PARTS, RunMode, Setting, Trial
from wholebatch.tune.tuning import Tuned, tune

__all__ = [
    "PARTS",
    "Bottleneck",
    "Limits",
    "RanksModel",
    "RunMode",
    "SearchObserver",
    "Setting",
    "Trial",
    "Tuned",
    "parse_bandwidth",
    "tune",
]
