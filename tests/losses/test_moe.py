"""Mixtures of experts: the balance loss of the whole batch, from micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.coupled.mixtures import InFloat64, mixture, texts, undivided
from tests.support import EXACT, Seen, distance
from wholebatch.errors import LossError, OptionError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def stepped(model: Any, batch: Any, micro_batch: Any, **options: Any) -> tuple[Any, list[Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    recorder = Seen(model, optimizer)
    loss = options.pop("loss", None) or wb.moe_loss(keep=options.pop("keep", 1))
    with InFloat64():
        train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=micro_batch, **options)
        step = train.step(batch)
    return step, recorder.gradients[0]


@pytest.mark.parametrize(
    ("kind", "micro_batch", "checkpointing"),
    [
        ("Mixtral", 1, True),
        ("Mixtral", 9, False),
        ("Qwen2Moe", 2, True),
        ("Qwen3Moe", 4, False),
    ],
)
def test_the_update_of_the_undivided_batch(
    kind: str, micro_batch: int, checkpointing: bool
) -> None:
    pytest.importorskip("transformers")
    model, batch = mixture(kind), texts()
    loss, reference = undivided(model, batch)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    step, ours = stepped(model, batch, micro_batch)
    assert distance(ours, reference) <= EXACT
    assert abs(step.loss - loss) <= EXACT * abs(loss)
    assert step.terms.keys() == {"loss", "balance"}


class Router(nn.Module):
    """One layer of experts, by hand, as torchtitan and others write it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.router = nn.Linear(6, 4)
        self.experts = nn.Parameter(torch.randn(4, 6, 3) / 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        best, chosen = logits.softmax(-1).max(-1)
        return torch.einsum("ni,nio->no", x, self.experts[chosen]) * best[:, None], logits


def routed(model: Any, micro: Any) -> tuple[wb.Loss, list[Tensor]]:
    out, logits = model(micro["x"])
    return wb.cross_entropy(out, micro["y"]), [logits, logits.flip(-1) * 0.5]


def rows(number: int = 23, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(number, 6, generator=generator, dtype=dtype) + 0.4
    return {"x": x, "y": torch.randint(0, 3, (number,), generator=generator)}


def by_hand(model: Any, batch: Any, *, z: float, weight: float) -> Tensor:
    """The loss of an undivided batch, written out."""
    loss, routers = routed(model, batch)
    means = []
    for logits in routers:
        chance = logits.softmax(-1)
        share = F.one_hot(chance.topk(2).indices, 4).sum(1).double().mean(0)
        means.append((share, chance.mean(0)))
    share, chance = (torch.stack(both).mean(0) for both in zip(*means, strict=True))
    balance = 4 * (share * chance).sum()
    logs = [logits.logsumexp(-1).square().mean() for logits in routers]
    total: Tensor = loss.total / loss.units + weight * balance
    return total + z * sum(logs) / len(logs)


@pytest.mark.parametrize("micro_batch", [1, 4, 7])
@pytest.mark.parametrize("keep", [0, 2])
def test_a_model_of_ones_own_with_z_loss(micro_batch: int, keep: int) -> None:
    model, batch = Router().double(), rows()
    reference = by_hand(model, batch, z=0.3, weight=0.7)
    gradients = torch.autograd.grad(reference, list(model.parameters()))
    loss = wb.moe_loss(routed, balance=0.7, z=0.3, top_k=2, keep=keep)
    step, ours = stepped(model, batch, micro_batch, loss=loss)
    assert distance(ours, gradients) <= EXACT
    assert step.loss == pytest.approx(float(reference.detach()), rel=EXACT)
    assert step.terms.keys() == {"loss", "balance", "z"}


def test_what_is_missing_is_said() -> None:
    batch = rows()
    with pytest.raises(LossError, match="found no router logits"):
        stepped(Router().double(), batch, 5, loss=wb.moe_loss(lambda m, x: routed(m, x)[0]))
    with pytest.raises(OptionError, match=r"moe_loss\(balance=None\): Router has no router_aux"):
        stepped(Router().double(), batch, 5, loss=wb.moe_loss(routed, top_k=2))
    with pytest.raises(LossError, match="a mask of 3 tokens for router logits of"):
        masked = wb.moe_loss(lambda m, x: (*routed(m, x), torch.ones(3)), balance=1.0, top_k=2)
        stepped(Router().double(), batch, 5, loss=masked)
    with pytest.raises(OptionError, match="top_k=0"):
        wb.moe_loss(top_k=0)


def test_a_loss_that_is_no_sum_is_found_beside_the_balance() -> None:
    """The look sees the loss itself too, not only the routers."""

    def mean(model: Any, micro: Any) -> Any:
        loss, routers = routed(model, micro)
        return wb.Loss(loss.total / len(micro["y"]), len(micro["y"])), routers

    with pytest.raises(UnsupportedError, match="cannot give the update of the whole batch"):
        stepped(Router().double(), rows(), 5, loss=wb.moe_loss(mean, balance=0.1, top_k=2))
