"""Out of memory anywhere in a window ends in the numbers of the split that went through."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb
from tests.memory.inject import LimitedMemory, OutOfMemoryAt
from tests.memory.models import loss, mlp, vectors
from wholebatch.batch import batch_size_of, split
from wholebatch.memory import MemoryMeter
from wholebatch.memory.out_of_memory import Attempt, Recovery
from wholebatch.window.precision import LossScale


@pytest.fixture(autouse=True)
def _collected_quickly() -> Iterator[None]:
    """A recovery collects garbage; in a sweep of hundreds, the test session's own is in the way."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def model_with_everything() -> nn.Module:
    """Dropout draws random numbers, BatchNorm moves buffers: both must be put back."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 5)
    ).double()


def doubles(n: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(n, 20).double(), "y": torch.randint(0, 5, (n,))}


def forwards_and_backwards(model: nn.Module) -> Callable[..., list[float]]:
    def attempt(micros: Sequence[Any], at: Callable[[int], None]) -> list[float]:
        totals = []
        for index, micro in enumerate(micros):
            at(index)
            total = loss(model, micro).total
            total.backward()
            totals.append(float(total.detach()))
        return totals

    return attempt


def everything(model: nn.Module) -> list[torch.Tensor]:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == 6
    return [*gradients, *model.buffers(), torch.get_rng_state()]


def all_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def halves(attempt: Attempt) -> list[Any]:
    """Cut every micro-batch in two."""
    sizes = [batch_size_of(micro) for micro in attempt.micros]
    parts = (split(m, -(-n // 2)) for m, n in zip(attempt.micros, sizes, strict=True))
    return [part for both in parts for part in both]


def run(recovery: Recovery, micros: Sequence[Any], make: Any, discard: Any) -> tuple[Any, Any]:
    """Make attempts until one goes through; return its result, and its micro-batches."""
    result = None
    for attempt in recovery.attempts(micros, discard=discard, smaller=halves):
        with attempt:
            result = make(attempt.micros, partial(setattr, attempt, "place"))
    return result, attempt.micros


def recovered_run(n: int | None) -> tuple[list[torch.Tensor], list[int], OutOfMemoryAt]:
    model = model_with_everything()
    micros = split(doubles(12), 4)
    injected = OutOfMemoryAt(n)
    attempt = forwards_and_backwards(model)

    def failing(micros: Sequence[Any], at: Callable[[int], None]) -> list[float]:
        with injected:
            return attempt(micros, at)

    torch.manual_seed(2)
    _, parts = run(Recovery(model), micros, failing, discard=model.zero_grad)
    return everything(model), [batch_size_of(part) for part in parts], injected


def split_so_from_the_start(sizes: list[int]) -> list[torch.Tensor]:
    model = model_with_everything()
    batch = doubles(12)
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    micros = [
        {name: value[start : start + size] for name, value in batch.items()}
        for start, size in zip(starts, sizes, strict=True)
    ]
    torch.manual_seed(2)
    forwards_and_backwards(model)(micros, lambda index: None)
    return everything(model)


def test_a_failure_at_every_operation_ends_in_the_exact_window() -> None:
    _, sizes, counted = recovered_run(None)
    assert sizes == [4, 4, 4]
    assert counted.seen > 60
    reference = split_so_from_the_start([2] * 6)
    for n in range(counted.seen):
        got, sizes, injected = recovered_run(n)
        assert injected.failed_at is not None
        assert sizes == [2] * 6
        assert all_equal(got, reference), f"operation {n}, {injected.failed_at}"


def test_only_the_typed_error_is_recovered_from() -> None:
    model = mlp()

    def attempt(micros: Sequence[Any], at: Callable[[int], None]) -> None:
        raise RuntimeError("CUDA out of memory")  # the text alone says nothing

    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        run(Recovery(model), [vectors(4)], attempt, discard=model.zero_grad)


def test_the_loss_scale_is_put_back() -> None:
    model = mlp()
    scale = LossScale(torch.amp.GradScaler("cpu", init_scale=1024.0), torch.device("cpu"))
    scale.scaler.scale(torch.zeros(()))
    seen = []

    def attempt(micros: Sequence[Any], at: Callable[[int], None]) -> int:
        seen.append(scale.value())
        scale.update(finite=False)  # halves it
        if len(micros) == 1:
            raise torch.OutOfMemoryError("full")
        return len(micros)

    recovery = Recovery(model, scale=scale)
    assert run(recovery, [vectors(4)], attempt, discard=model.zero_grad)[0] == 2
    assert seen == [1024.0, 1024.0]


def test_one_sample_that_does_not_fit_says_what_would_help() -> None:
    model = mlp()

    def fails(model: nn.Module, micro: Any) -> wb.Loss:
        raise torch.OutOfMemoryError("full at 3 bytes")

    options: Any = {"loss": fails, "micro_batch": 1, "audit": False}
    train = wb.WholeBatch(model, torch.optim.SGD(model.parameters()), **options)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"of one sample does not fit .*full at 3 bytes.*bf16"
    ):
        train.step(vectors(2))


def test_a_bound_stops_endless_loops() -> None:
    model = mlp()

    def attempt(micros: Sequence[Any], at: Callable[[int], None]) -> None:
        raise torch.OutOfMemoryError("always")

    with pytest.raises(torch.OutOfMemoryError, match="out of memory 64 times in one window"):
        for one in Recovery(model).attempts(
            [vectors(4)], discard=model.zero_grad, smaller=lambda attempt: attempt.micros
        ):
            with one:
                attempt(one.micros, lambda index: None)


def test_nothing_of_a_failed_attempt_stays_in_memory() -> None:
    model = mlp(128)
    seen = []

    def attempt(micros: Sequence[Any], at: Callable[[int], None]) -> None:
        seen.append(meter.current)
        for index, micro in enumerate(micros):
            at(index)
            total = loss(model, micro).total
            if len(micros) == 1:
                raise torch.OutOfMemoryError("now")
            total.backward()

    batch = vectors(512)
    with MemoryMeter(model=model) as meter:
        run(Recovery(model), [batch], attempt, discard=model.zero_grad)
    assert seen[1] <= seen[0] + batch["x"].nbytes + batch["y"].nbytes


def test_whole_batch_within_a_budget_is_the_same_update() -> None:
    def updated(budget: int | None) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        model = mlp(64).double()
        train = wb.WholeBatch(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, micro_batch="auto"
        )
        batch = {k: v.double() if v.is_floating_point() else v for k, v in vectors(256).items()}
        with LimitedMemory(budget, model) if budget else nullcontext():
            step = train.step(batch)
        return list(model.parameters()), step.micro_batches

    whole, one = updated(None)
    parts, many = updated(300_000)
    assert (one, many > 1) == (1, True)
    for a, b in zip(whole, parts, strict=True):
        assert (a - b).norm() <= 1e-12 * a.norm()
