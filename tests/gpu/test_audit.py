"""On a CUDA device: the look before the first split window finds mistakes and raises no alarm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.support import grouped


class Attention(nn.Module):
    """A block with dropout in its attention kernel and beside it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        rate = 0.1 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        made: Tensor = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return made


def language_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Embedding(50, 64), Attention(), nn.LayerNorm(64), Attention(), nn.Linear(64, 50)
    ).cuda()


def next_token(model: nn.Module, micro: Tensor) -> wb.Loss:
    return wb.cross_entropy(model(micro[:, :-1]), micro[:, 1:])


def stepped(model: nn.Module, loss: Any, batch: Any, **options: Any) -> wb.Step:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return wb.WholeBatch(
        model, optimizer, loss=loss, **grouped({"micro_batch": 8, **options})
    ).step(batch)


def refusal(model: nn.Module, loss: Any, batch: Any) -> str:
    try:
        stepped(model, loss, batch)
    except wb.errors.WholebatchError as error:
        return str(error)
    raise AssertionError("trained in silence")


def test_dropout_in_and_beside_the_attention_kernel_raises_no_alarm() -> None:
    tokens = torch.randint(0, 50, (30, 33))
    for precision in ("full", "bf16"):
        for execute in ("eager", "auto"):
            step = stepped(
                language_model(), next_token, tokens, precision=precision, execute=execute
            )
            assert step.micro_batches == 4


def test_draws_of_the_loss_raise_no_alarm() -> None:
    def denoise(model: nn.Module, x: Tensor) -> Tensor:
        noise, when = torch.randn_like(x), torch.rand(len(x), 1, device=x.device)
        return (model(when.sqrt() * x + (1 - when).sqrt() * noise) - noise).square().mean(1)

    model = nn.Sequential(nn.Linear(24, 64), nn.SiLU(), nn.Linear(64, 24)).cuda()
    assert stepped(model, denoise, torch.randn(30, 24)).units == 30


def test_state_that_a_forward_moves_is_refused_and_put_back() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read = nn.Linear(24, 8)
            self.register_buffer("centre", torch.zeros(24))

        def forward(self, x: Tensor) -> Tensor:
            self.centre.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            made: Tensor = self.read(x - self.centre)
            return made

    model = Centred().cuda()
    before = torch.cuda.get_rng_state()
    said = refusal(model, lambda m, x: m(x).square().sum(1), torch.randn(30, 24) + 1)
    assert "centre" in said
    assert not model.centre.any()
    assert torch.equal(torch.cuda.get_rng_state(), before)
