"""Exact gradient accumulation in Keras 3, on its TensorFlow and torch backends.

```python
from wholebatch.integrations.keras import GradientAccumulateModel

model = GradientAccumulateModel(accum_steps=4, inputs=model.inputs, outputs=model.outputs)
model.compile(optimizer, loss, ...)          # as before
model.fit(x, y, batch_size=8)                # 4 × 8 samples make one update, that of all 32
```

| name | for |
|---|---|
| `GradientAccumulateModel` | `compile` and `fit` as they are; it counts units itself |
| `GradientAccumulateOptimizer` | a model that must stay as it is, with equal micro-batches |

A loop of your own around `tf.GradientTape` needs none of them: examples/integrations/keras_tape.py.
"""

from __future__ import annotations

from wholebatch.errors import UnsupportedError
from wholebatch.optional_packages import require

require("keras", at_least="3.10", extra="keras", purpose="wholebatch in Keras")

import keras  # noqa: E402

if keras.backend.backend() not in ("tensorflow", "torch"):
    raise UnsupportedError(
        f"Keras with the backend {keras.backend.backend()}: set KERAS_BACKEND to tensorflow or "
        "torch; on JAX use wholebatch.integrations.jax.accumulate in a loop of your own"
    )

from wholebatch.integrations.keras.accumulate_model import GradientAccumulateModel  # noqa: E402
from wholebatch.integrations.keras.accumulate_optimizer import GradientAccumulateOptimizer  # noqa: E402

__all__ = ["GradientAccumulateModel", "GradientAccumulateOptimizer"]
