"""Exact gradient accumulation in JAX and optax.

```python
from wholebatch.integrations.jax import accumulate

value, gradient = accumulate(loss_fn, micro_batch=8)(params, batch)
```

`accumulate` replaces `jax.value_and_grad` and takes the whole batch. It needs no torch.
"""

from wholebatch.optional_packages import require

require("jax", at_least="0.6", extra="jax", purpose="wholebatch in JAX")

from wholebatch.integrations.jax.accumulate import accumulate  # noqa: E402

__all__ = ["accumulate"]
