"""wb.Coupled as the loss of WholeBatch: the update of the undivided batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.support import EXACT, Seen, Whole, adamw, distance, sgd

Batch = dict[str, Tensor]


def tower(dropout: float = 0.0, *, norm: bool = False) -> nn.Sequential:
    middle: nn.Module = nn.BatchNorm1d(16) if norm else nn.Identity()
    return nn.Sequential(
        nn.Linear(6, 16), middle, nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 4)
    ).double()


class Clip(nn.Module):
    def __init__(self, dropout: float = 0.0, *, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.image, self.text = tower(dropout, norm=norm), tower(dropout, norm=norm)
        self.log_scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))


def batch(number: int = 13, seed: int = 0) -> Batch:
    made = torch.Generator().manual_seed(seed)
    image, text = torch.randn(2, number, 6, dtype=torch.float64, generator=made)
    return {"image": image, "text": text, "label": torch.arange(number) % 3}


def encode(model: Clip, micro: Batch) -> Batch:
    return {
        "image": model.image(micro["image"]),
        "text": model.text(micro["text"]),
        "label": micro["label"],
    }


LOSSES: dict[str, Callable[[Clip, Batch], wb.Loss]] = {
    "clip": lambda m, r: wb.losses.clip_loss(
        r["image"], r["text"], scale=m.log_scale.exp(), rows=5
    ),
    "info_nce": lambda m, r: wb.losses.info_nce(r["image"], r["text"], temperature=m.log_scale),
}


def coupled(model: Clip, name: str = "clip") -> wb.Coupled:
    return wb.Coupled(encode, lambda all: LOSSES[name](model, all))


def mean_of(name: str) -> Callable[[Any, Any], Tensor]:
    def mean(model: Any, data: Any) -> Tensor:
        loss = LOSSES[name](model, encode(model, data))
        return loss.total / loss.units

    return mean


@pytest.mark.parametrize("micro_batch", [1, 4, 5, 13])
@pytest.mark.parametrize("name", LOSSES)
def test_the_update_is_that_of_the_undivided_batch(name: str, micro_batch: int) -> None:
    model = Clip()
    whole = Whole(model, adamw, loss=mean_of(name), clip_norm=0.3)
    optimizer = adamw(model)
    seen = Seen(model, optimizer)
    train = wb.WholeBatch(
        model, optimizer, loss=coupled(model, name), micro_batch=micro_batch, clip_norm=0.3
    )
    for seed in range(3):
        reference = whole.step(batch(seed=seed))
        step = train.step(batch(seed=seed))
        assert math.isclose(step.loss, reference, rel_tol=1e-12)
        assert (step.units, step.micro_batches) == (13, math.ceil(13 / micro_batch))
    whole.assert_same(model, seen)


@pytest.mark.parametrize("name", LOSSES)
def test_dropout_is_the_same_in_both_passes(name: str) -> None:
    """Against the graphs of all micro-batches alive at once, with the same random numbers."""
    model = Clip(dropout=0.4)
    reference = copy.deepcopy(model)
    data = batch()
    torch.manual_seed(3)
    parts = [encode(reference, {k: v[i : i + 5] for k, v in data.items()}) for i in range(0, 13, 5)]
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    loss = LOSSES[name](reference, joined)
    (loss.total / loss.units).backward()
    after = torch.get_rng_state()
    optimizer = sgd(model)
    seen = Seen(model, optimizer)
    torch.manual_seed(3)
    wb.WholeBatch(model, optimizer, loss=coupled(model, name), micro_batch=5).step(data)
    right = [torch.zeros_like(p) if p.grad is None else p.grad for p in reference.parameters()]
    assert distance(seen.gradients[0], right) <= EXACT
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_is_no_further_from_float64_than_the_undivided_batch(
    precision: str, keep: int
) -> None:
    exact = Clip()
    data = batch(64)
    mean_of("clip")(exact, data).backward()
    truth = [p.grad for p in exact.parameters()]
    low = {k: v.float() if v.is_floating_point() else v for k, v in data.items()}
    plain = Clip().float()
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    with torch.autocast("cpu", dtype=dtype):
        loss = mean_of("clip")(plain, low)
    (loss * 1024).backward()
    undivided = distance([p.grad / 1024 for p in plain.parameters()], truth)  # type: ignore[operator, arg-type]
    model = Clip().float()
    optimizer = sgd(model)
    seen = Seen(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if precision == "fp16" else None
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=replace(coupled(model), keep=keep),
        micro_batch=12,
        precision=precision,
        close=wb.Close(scaler=scaler),
    )
    step = train.step(low)
    assert step.loss_scale == (1024.0 if precision == "fp16" else 1.0)
    ours = distance(seen.gradients[0], truth)  # type: ignore[arg-type]
    assert 0 < ours <= 1.25 * undivided


class Counted(Clip):
    """Its forward moves a buffer."""

    def __init__(self) -> None:
        super().__init__(0.3)
        self.register_buffer("calls", torch.zeros(()))


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("keep", [1, 2, 9])
def test_graphs_that_are_kept_are_not_encoded_again(keep: int, moves: bool) -> None:
    made = []
    for kept in (0, keep):
        model = Counted()
        calls = []

        def counted(model: Any, micro: Batch, calls: list[int] = calls) -> Batch:
            calls.append(len(micro["label"]))
            if moves:
                model.calls += 1
            return encode(model, micro)

        optimizer = sgd(model)
        seen = Seen(model, optimizer)
        loss = wb.Coupled(counted, lambda all, m=model: LOSSES["clip"](m, all), keep=kept)
        train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=4, audit=False)
        torch.manual_seed(6)
        assert train.step(batch()).micro_batches == 4
        again = [4, 4, 4, 1] if moves else [1, 4, 4, 4][kept:]  # from the last to the first
        assert calls == [4, 4, 4, 1, *again]
        assert model.calls == (4 if moves else 0)
        made.append((seen.gradients[0], torch.get_rng_state()))
    assert all(map(torch.equal, made[1][0], made[0][0])), "in one order, to the same bits"
    assert torch.equal(made[1][1], made[0][1])


def test_terms_and_numbers_pass_through() -> None:
    model = Clip()

    def with_size(model: Clip, micro: Batch) -> dict[str, Any]:
        made = encode(model, micro)
        return {**made, "size": len(micro["label"]), "nothing": None}

    def loss(all: dict[str, Any]) -> Any:
        assert all["size"].sum() == 13
        assert all["nothing"] is None
        contrast = LOSSES["clip"](model, all)
        spread = all["image"].square().sum()
        return wb.Loss.terms(
            {"contrast": (contrast.total, contrast.units), "spread": (spread, 26, 0.5)}
        )

    def mean(model: Any, data: Batch) -> Tensor:
        made = encode(model, data)
        contrast = LOSSES["clip"](model, made)
        return contrast.total / 13 + 0.5 * made["image"].square().sum() / 26

    whole = Whole(model, loss=mean)
    optimizer = sgd(model)
    seen = Seen(model, optimizer)
    train = wb.WholeBatch(model, optimizer, loss=wb.Coupled(with_size, loss), micro_batch=4)
    step = train.step(batch())
    assert math.isclose(step.loss, whole.step(batch()), rel_tol=1e-12)
    assert step.terms.keys() == {"contrast", "spread"}
    whole.assert_same(model, seen)


def test_a_representation_that_is_not_finite_makes_no_update() -> None:
    model = Clip()
    data = batch()
    data["image"][9, 0] = math.inf
    before = [p.clone() for p in model.parameters()]
    train = wb.WholeBatch(model, sgd(model), loss=coupled(model), micro_batch=4)
    with pytest.raises(wb.errors.NonFiniteError, match="the batch has a loss that is not finite"):
        train.step(data)
    assert all(map(torch.equal, before, model.parameters()))
    train = wb.WholeBatch(
        model, sgd(model), loss=coupled(model), micro_batch=4, close=wb.Close(nonfinite="skip")
    )
    assert train.step(data).skipped == "the batch has a loss that is not finite"
    assert train.skipped == 1
    assert train.step(batch()).skipped is None


def test_an_encoder_that_is_not_repeatable_leaves_nothing_behind() -> None:
    model = Clip()
    generator = torch.Generator()

    def noisy(model: Clip, micro: Batch) -> Batch:
        made = encode(model, micro)
        noise = torch.randn(made["image"].shape, generator=generator, dtype=torch.float64)
        return {**made, "image": made["image"] + noise}

    loss = wb.Coupled(noisy, lambda all: LOSSES["clip"](model, all))
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=4, audit=False)
    with pytest.raises(wb.errors.WindowError, match="different representations the second time"):
        train.step(batch())
    assert all(p.grad is None for p in model.parameters())
    assert train.updates == 0


@pytest.mark.parametrize(
    "encode, message",
    [
        (lambda model, x: "text", "encode returned str"),
        (lambda model, x: [model(x)] * len(x), "another structure"),
    ],
)
def test_what_an_encoder_returns_is_checked(encode: Any, message: str) -> None:
    model = tower()
    train = wb.WholeBatch(
        model,
        sgd(model),
        loss=wb.Coupled(encode, lambda all: wb.Loss(all.sum(), 1)),
        micro_batch=4,
        audit=False,
    )
    with pytest.raises(wb.errors.LossError, match=message):
        train.step(torch.randn(11, 6, dtype=torch.float64))
