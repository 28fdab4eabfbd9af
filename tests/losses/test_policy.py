"""Policy losses: every named mean, over uneven splits, is that of the undivided batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.losses.problem import (
    GROUPS,
    MEANS,
    UNEVEN,
    Batch,
    Policy,
    batch,
    by_hand,
    clipped,
    logprobs,
    ours,
    undivided,
)
from tests.support import EXACT, Seen, Whole, distance, pieces, sgd


def gradient(model: nn.Module, total: Tensor) -> list[Tensor]:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(total, parameters, allow_unused=True, retain_graph=True)
    pairs = zip(gradients, model.parameters(), strict=True)
    return [torch.zeros_like(p) if g is None else g for g, p in pairs]


def assert_same(loss: wb.Loss, reference: Tensor, model: nn.Module) -> None:
    """The value and the gradient of one undivided batch."""
    mean = loss.total / loss.units
    assert mean.item() == pytest.approx(reference.item(), rel=1e-13, abs=1e-15)
    assert distance(gradient(model, mean), gradient(model, reference)) <= EXACT


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("sizes", UNEVEN, ids=str)
def test_every_mean_is_that_of_the_undivided_batch(mean: str, sizes: tuple[int, ...]) -> None:
    model, data = Policy(), batch()
    whole = Whole(model, loss=undivided(mean))
    value = whole.step(data)
    optimizer = sgd(model)
    recorder = Seen(model, optimizer)
    acc = wb.Accumulator(model, optimizer, steps=len(sizes))
    for micro in pieces(data, sizes):
        step = acc.backward(ours(mean)(model, micro))
    assert step is not None
    assert step.loss == pytest.approx(value, rel=1e-12)
    whole.assert_same(model, recorder)


def by_tokens(model: nn.Module, data: Batch, of_token: Any, mean: str = "tokens") -> Tensor:
    """The mean by hand of a function of (sequence, token)."""
    lengths = data["mask"].sum(1).tolist()
    losses = [[of_token(i, t) for t in range(int(n))] for i, n in enumerate(lengths)]
    return by_hand(mean, losses, list(GROUPS))


@pytest.mark.parametrize("clip", [0.1, (0.05, 0.28), None], ids=str)
@pytest.mark.parametrize("max_ratio", [None, 1.3])
def test_clipping(clip: Any, max_ratio: float | None) -> None:
    model, data = Policy(), batch()
    logs = logprobs(model, data)
    low, high = clip if isinstance(clip, tuple) else (clip, clip)

    def token(i: int, t: int) -> Tensor:
        ratio = (logs[i, t] - data["old"][i, t]).exp()
        advantage = data["advantages"][i]
        if max_ratio is not None:
            ratio = ratio.clamp(max=max_ratio)
        if clip is None:
            return -ratio * advantage
        kept = (logs[i, t] - data["old"][i, t]).exp().clamp(1 - low, 1 + high)
        return -torch.min(ratio * advantage, kept * advantage)

    loss = ours("tokens", clip=clip, max_ratio=max_ratio)(model, data)
    assert_same(loss, by_tokens(model, data, token), model)


@pytest.mark.parametrize("mean", ["tokens", "sequences"])
def test_ratios_of_sequences(mean: str) -> None:
    """GSPO: the geometric mean of a sequence's ratios."""
    model, data = Policy(), batch()
    logs = logprobs(model, data)

    def token(i: int, _: int) -> Tensor:
        length = int(data["mask"][i].sum())
        ratio = (logs[i, :length] - data["old"][i, :length]).mean().exp()
        advantage = data["advantages"][i]
        return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)

    loss = ours(mean, ratio="sequence")(model, data)
    assert_same(loss, by_tokens(model, data, token, mean), model)


KL = {
    "k1": lambda ours, theirs: ours - theirs,
    "k2": lambda ours, theirs: (ours - theirs) ** 2 / 2,
    "k3": lambda ours, theirs: (theirs - ours).exp() - (theirs - ours) - 1,
}


@pytest.mark.parametrize("estimator", KL)
def test_kl_inside_the_policy_loss_shares_its_mean(estimator: Any) -> None:
    model, data = Policy(), batch()
    logs = logprobs(model, data)

    def token(i: int, t: int) -> Tensor:
        kl = KL[estimator](logs[i, t], data["reference"][i, t])
        advantage = data["advantages"][i]
        return clipped(logs[i, t], data["old"][i, t], advantage, 0.2, 0.2) + 0.04 * kl

    plus = 0.04 * wb.losses.token_kl(logs, data["reference"], estimator)
    loss = wb.losses.policy_loss(
        logs, data["advantages"], data["mask"], old=data["old"], plus=plus, mean="sequences"
    )
    assert_same(loss, by_tokens(model, data, token, "sequences"), model)


# ---------------------------------------------------- terms with units of their own


def terms(model: nn.Module, micro: Batch) -> Any:
    """Policy over groups, KL over sequences."""
    kl = wb.losses.token_kl(logprobs(model, micro), micro["reference"])
    of_sequences = wb.losses.aggregate(kl, micro["mask"], mean="sequences")
    return wb.Loss.terms({"policy": ours("groups")(model, micro), "kl": (of_sequences, 0.3)})


def units(micro: Batch) -> dict[str, wb.Loss | Any]:
    group_size = micro["group_tokens"]
    return {
        "policy": wb.losses.aggregate_units(micro["mask"], mean="groups", group_size=group_size),
        "kl": wb.losses.aggregate_units(micro["mask"], mean="sequences"),
    }


def test_what_announce_refuses() -> None:
    model, data = Policy(), batch()
    acc = wb.Accumulator(model, sgd(model), steps=2)
    with pytest.raises(wb.errors.OptionError, match="units by term"):
        acc.announce(4)  # type: ignore[arg-type]
    acc.announce(units(data))
    with pytest.raises(wb.errors.LossError, match="no named terms"):
        acc.backward(ours("tokens")(model, data))
    first, second = pieces(data, (5, 7))
    acc.announce({**units(data), "kl": 5})  # again: no loss has been added
    acc.backward(terms(model, first))
    with pytest.raises(wb.errors.WindowError, match="before its first backward"):
        acc.announce(units(data))
    with pytest.raises(wb.errors.LossError, match=r"5 units of term 'kl'.*returned 12"):
        acc.backward(terms(model, second))


# -------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": "bnpo"}, "mean='bnpo': must be one of tokens, .*: it changes with the split"),
        ({"mean": "words"}, "must be one of tokens"),
        ({"mean": "constant"}, "needs a positive number"),
        ({"constant": 4.0}, "no other mean takes it"),
        ({"mean": "groups"}, "of the whole batch"),
        ({"group_size": torch.ones(12)}, "no other mean takes it"),
        ({"mean": "groups", "group_size": torch.ones(3)}, "one number per sequence"),
        ({"clip": -0.1}, "clip=-0.1"),
        ({"ratio": "word"}, '"token" or "sequence"'),
        ({"mask": torch.ones(12)}, r"\[sequences, tokens\]"),
    ],
)
def test_refusals_say_what_to_do(options: dict[str, Any], message: str) -> None:
    data = batch()
    mask = options.pop("mask", data["mask"])
    with pytest.raises((wb.errors.OptionError, wb.errors.LossError), match=message):
        wb.losses.policy_loss(logprobs(Policy(), data), data["advantages"], mask, **options)
    with pytest.raises(wb.errors.OptionError, match='"k1", "k2" or "k3"'):
        wb.losses.token_kl(data["old"], data["old"], "k4")  # type: ignore[arg-type]


def test_what_is_masked_may_hold_anything() -> None:
    model, data = Policy(), batch()
    right = gradient(model, ours("sequences")(model, data).total)
    spoiled = {**data, "old": data["old"].masked_fill(~data["mask"], torch.nan)}
    assert distance(gradient(model, ours("sequences")(model, spoiled).total), right) == 0


def test_terms_are_looked_at_as_other_losses_are() -> None:
    model, (_, second) = Policy(), pieces(batch(), (5, 7))

    def compared(model: nn.Module, micro: Batch) -> Any:
        logs = logprobs(model, micro).sum(1)
        contrast = wb.losses.info_nce(logs[:, None], micro["advantages"][:, None])
        return wb.Loss.terms({"policy": ours("tokens")(model, micro), "nce": (contrast, 0.5)})

    acc = wb.Accumulator(model, sgd(model), steps=2)
    acc.announce({"policy": 42, "nce": 12})
    with pytest.raises(wb.errors.LossError, match="info_nce"):
        acc.backward(compared(model, second))
    train = wb.WholeBatch(
        model,
        sgd(model),
        loss=compared,
        units=lambda m: {"policy": m["mask"].sum(), "nce": len(m["mask"])},
        micro_batch=5,
    )
    with pytest.raises(wb.errors.LossError, match="info_nce"):
        train.step(batch())
