"""Tuning: the fastest settings here, their bottleneck, and whether to accumulate at all.

```python
from wholebatch.tune import tune

found = tune(make, loss=loss, batch=batch, memory="20GiB", precisions=("full", "bf16"))
found.best.setting, found.advice, found.bottleneck
found.write(Path("tune.json"))          # wholebatch train --from tune.json
```

Names are loaded when first used: the command line reads `tune.batch_scaling` without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wholebatch.tune.machine_speed import parse_bandwidth as parse_bandwidth
    from wholebatch.tune.setting_measurements import Limits as Limits
    from wholebatch.tune.settings import RunMode as RunMode
    from wholebatch.tune.settings import Setting as Setting
    from wholebatch.tune.settings import Trial as Trial
    from wholebatch.tune.tuning import Tuned as Tuned
    from wholebatch.tune.tuning import tune as tune

_HOMES = {
    "Limits": "setting_measurements",
    "RunMode": "settings",
    "Setting": "settings",
    "Trial": "settings",
    "Tuned": "tuning",
    "parse_bandwidth": "machine_speed",
    "tune": "tuning",
}

if not TYPE_CHECKING:  # a type checker that saw this would believe any name exists

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
