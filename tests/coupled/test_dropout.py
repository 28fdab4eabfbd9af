"""With masks per sample the gradient is the same however the batch is split."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from wholebatch.coupled.sample_draws import PerSample
from wholebatch.errors import UnsupportedError, WindowError


class Net(nn.Module):
    """Dropout in every usual place: a module, a function, attention, and a dropped path."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.embed = nn.Embedding(20, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.4), nn.Linear(16, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.dropout(self.embed(ids), 0.2, self.training)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        y = checkpoint(self.mlp, x, use_reentrant=False) if self.again else self.mlp(x)
        path = x.new_empty(len(x), 1, 1).bernoulli_(0.7)
        return self.head((x + y * path).mean(1))


def gradient(model: nn.Module, ids: Tensor, parts: list[Tensor], seed: int = 4) -> Tensor:
    model.zero_grad()
    torch.manual_seed(seed)
    drop = PerSample()
    drop.begin_window()
    after = torch.get_rng_state()
    for samples in parts:
        with drop.micro(samples):
            model(ids[samples]).square().sum().backward()
    assert torch.equal(torch.get_rng_state(), after)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


IDS = torch.arange(9 * 5).view(9, 5) * 7 % 20
ORDER = torch.tensor([4, 0, 8, 2, 6, 1, 3, 7, 5])


@pytest.mark.parametrize(
    "parts",
    [list(torch.arange(9).split([4, 4, 1])), list(torch.arange(9).split(1)), list(ORDER.split(2))],
)
@pytest.mark.parametrize("again", [False, True])
def test_split_and_order_do_not_matter(parts: list[Tensor], again: bool) -> None:
    model = Net().double()
    want = gradient(model, IDS, [torch.arange(9)])
    model.again = again
    got = gradient(model, IDS, parts)
    assert (got - want).norm() <= 1e-12 * want.norm()


def test_seeds_samples_and_places_get_masks_of_their_own() -> None:
    model = Net().double()
    whole = [torch.arange(9)]
    assert (gradient(model, IDS, whole, seed=1) - gradient(model, IDS, whole, seed=2)).norm() > 1
    drop = PerSample()
    drop.begin_window()
    x = torch.ones(6, 500)
    with drop.micro(range(6)):
        first, second = F.dropout(x, 0.5), F.dropout(x, 0.5)
    assert not torch.equal(first, second)
    assert len({tuple(row.tolist()) for row in first}) == 6


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_rate_and_scale(p: float) -> None:
    drop = PerSample()
    drop.begin_window()
    with drop.micro(range(64)):
        out = F.dropout(torch.ones(64, 1000), p)
    kept = (out != 0).double().mean().item()
    assert kept == pytest.approx(1 - p, abs=0.01)
    if p < 1:
        assert torch.allclose(out[out != 0], torch.tensor(1 / (1 - p)))
    # No stripes: every sample and every position is kept about as often.
    assert (out != 0).double().mean(0).std() < 0.1


def test_padding_does_not_move_the_masks() -> None:
    drop = PerSample()
    drop.begin_window()
    with drop.micro(range(3)):
        long = F.dropout(torch.ones(3, 7, 4), 0.5)
    with drop.micro(range(3)):
        short = F.dropout(torch.ones(3, 5, 4), 0.5)
    assert torch.equal(long[:, :5], short)


def test_refusals() -> None:
    drop = PerSample()
    with pytest.raises(WindowError, match="before begin_window"), drop.micro([0]):
        pass
    drop.begin_window()
    with drop.micro(range(3)):
        with pytest.raises(UnsupportedError, match=r"shape \(4, 2\) in a micro-batch of 3"):
            F.dropout(torch.ones(4, 2), 0.5)
        with pytest.raises(UnsupportedError, match="draws other random numbers"):
            torch.randn(3)
