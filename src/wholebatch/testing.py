"""The proof as an assertion, for your own test suite.

```python
from wholebatch.testing import assert_right_loop, assert_same_update, assert_split_invariant


def test_accumulation_makes_the_whole_batchs_update():
    assert_same_update(make_model(), loss, make_batch(), micro_batch=3)


def test_my_loop():
    assert_right_loop(train_one_window)


def test_my_trainer():
    assert_split_invariant(train_with_micro_batches_of, micro_batches=(8, 4, 1), ranks=(1, 2))
```

A failure says which parameters are off, by how much, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from wholebatch.split_invariance import SplitReport, split_invariance
from wholebatch.verification import LoopVerdict, Verdict, verify, verify_loop

__all__ = ["assert_right_loop", "assert_same_update", "assert_split_invariant"]


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


def assert_split_invariant(
    train: Callable[[int], Any],
    micro_batches: Sequence[int] = (8, 4, 1),
    ranks: Sequence[int] = (1,),
    *,
    tolerance: float | None = None,
) -> SplitReport:
    """Fail unless `train` makes the same update of the same samples, however they are cut.

    It knows nothing of the trainer, the engine, the model or the loss. `train(micro_batch)` builds
    whatever it trains from fixed seeds, makes one update or more of the same samples in
    micro-batches of that size, and returns the model, its gradients, or a dict of tensors or
    arrays. Gradients are compared where they are returned, or seen by an optimizer of torch;
    elsewhere the movement of the parameters, in which Adam and clipping hide a factor.

    >>> import torch
    >>> def train(micro_batch):
    ...     torch.manual_seed(0)
    ...     model, data = torch.nn.Linear(3, 1), torch.randn(8, 3)
    ...     for micro in data.split(micro_batch):
    ...         model(micro).square().mean().backward()
    ...     return {name: p.grad for name, p in model.named_parameters()}
    >>> assert_split_invariant(train)
    Traceback (most recent call last):
    AssertionError: Another update ...

    Args:
        train: The function. On several ranks, one that other processes can import; each rank
            calls it in a gloo group of torch.distributed, for its own part of the samples.
        micro_batches: Samples per micro-batch; the first one is all of them.
        ranks: Numbers of ranks, each of which is a job of so many processes on this machine. With
            (1,) the function runs in this process, without a process group.
        tolerance: The largest relative L2 distance of a tensor. Default: the root of the rounding
            step, or 1e-10 in float64.
    """
    __tracebackhide__ = True
    report = split_invariance(train, micro_batches=micro_batches, ranks=ranks, tolerance=tolerance)
    if not report.same:
        raise AssertionError(str(report))
    return report
