"""The proof as an assertion, for your own test suite.

```python
from wholebatch.testing import assert_same_update, assert_right_loop


def test_accumulation_makes_the_whole_batchs_update():
    assert_same_update(make_model(), loss, make_batch(), micro_batch=3)


def test_my_loop():
    assert_right_loop(train_one_window)
```

A failure says which parameters are off, by how much, and why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from wholebatch.verification import LoopVerdict, Verdict, verify, verify_loop

__all__ = ["assert_right_loop", "assert_same_update"]


def __dir__() -> list[str]:
    return [*__all__]


def assert_same_update(
    model: nn.Module, loss: Callable[[Any, Any], Any], batch: Any, **options: Any
) -> Verdict:
    """Fail unless the accumulated update is that of the undivided batch; takes what `verify` does.

    Model, optimizer and random generators are left as they were.
    """
    __tracebackhide__ = True  # pytest shows the test's own line
    verdict = verify(model, loss, batch, **options)
    if not verdict.same:
        raise AssertionError(str(verdict))
    return verdict


def assert_right_loop(loop: Callable[[Any, Any, Any], object], **options: Any) -> LoopVerdict:
    """Fail unless `loop(model, optimizer, micro_batches)` is right; takes what `verify_loop` does.

    >>> import torch
    >>> def loop(model, optimizer, micro_batches):
    ...     for micro in micro_batches:
    ...         logits = model(micro["x"]).flatten(0, -2)
    ...         torch.nn.functional.cross_entropy(logits, micro["y"].flatten()).backward()
    ...     optimizer.step()
    >>> assert_right_loop(loop, case="mlp")
    Traceback (most recent call last):
    AssertionError: Wrong: not divided: ...
    """
    __tracebackhide__ = True
    verdict = verify_loop(loop, **options)
    if not verdict.same:
        raise AssertionError(str(verdict))
    return verdict
