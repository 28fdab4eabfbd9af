"""Gradient stores under graphs: the update of the undivided batch, and the memory of each store."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb
from tests.compile.nets import mode_of, traced
from tests.support import EXACT, Whole, adamw, mlp, pieces, samples
from wholebatch.options import grouped
from wholebatch.window import gradient_store

STORES: dict[str, dict[str, Any]] = {  # with a fused optimizer where that makes a difference
    "swap": {"clip_norm": 0.05},
    "release": {"nonfinite": "skip"},
    "host": {"clip_norm": 0.05},
}


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def made(model: nn.Module, store: str, sizes: list[int], **options: Any) -> wb.WholeBatch:
    options = {**STORES[store], "units": lambda m: len(m["y"]), **options}
    optimizer = fused(model) if store == "release" else adamw(model)
    train = traced(model, optimizer, **grouped({"gradients": store, **options}))
    train._fitting.split = lambda batch: pieces(batch, sizes)  # type: ignore[method-assign]
    return train


@pytest.mark.parametrize("sizes", [[4, 4, 2], [1, 6, 3]], ids=str)
@pytest.mark.parametrize("store", STORES)
def test_update_of_the_undivided_batch(
    store: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wholebatch.offload.parameter_buckets._SMALLEST_BUCKET", 700)
    model = mlp()
    whole = Whole(
        model, fused if store == "release" else adamw, clip_norm=STORES[store].get("clip_norm")
    )
    train = made(model, store, sizes)
    modes: set[str] = set()
    for _ in range(4):
        batch = samples(10)
        expected = whole.step(batch)
        step = train.step(batch, after_micro=lambda *_: modes.add(mode_of(train)))
        assert step.loss == pytest.approx(expected, rel=1e-12)
    assert modes == {"eager", "operations"}
    whole.assert_same(model, at_most=10 * EXACT)


def test_released_gradients_of_an_only_micro_batch_have_no_buffers() -> None:
    model = mlp()
    whole, train = Whole(model, fused), made(model, "release", [10])
    for _ in range(3):
        whole.step(samples(10))
        train.step(samples(10))
    assert mode_of(train) == "eager"
    assert not train._runner.executor._gradients._buffers
    whole.assert_same(model, at_most=10 * EXACT)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_loss_that_is_not_finite_releases_nothing(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device closes the window by itself, on CUDA and here for once, or the host does."""
    closed: list[bool] = []
    real = gradient_store.close_ahead

    def noted(*given: Any, **options: Any) -> Any:
        made = real(*given, **options)
        closed.append(made is not None)
        return made

    monkeypatch.setattr(gradient_store, "can_close_ahead", lambda *_: on_device)
    model = mlp(dtype=torch.float32)
    plain, reference = mlp(dtype=torch.float32), samples(10, dtype=torch.float32)
    beside = made(plain, "release", [10], gradients="device")
    train = made(model, "release", [5, 5])
    for _ in range(3):
        norms = [one.step(reference).grad_norm for one in (beside, train)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    monkeypatch.setattr(gradient_store, "close_ahead", noted)
    parts = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in parts)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    bad = samples(10, dtype=torch.float32)
    bad["x"][7] = float("nan")
    assert train.step(bad).skipped is not None
    assert mode_of(train) == "operations"
    assert all(map(torch.equal, before, model.parameters()))
    assert train.step(reference).skipped is None
    assert closed == ([False, True] if on_device else [])
