"""A graph adds every gradient in its buffer's format, whatever the parameters and the forward have.

Tied and untied embeddings that are used once and twice, frozen parts, and what else has weights, in
micro-batches of 4, 4 and 2 rows.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.compile.nets import Micro, mean_of_tokens, mode_of, run_rewritten, tagged, traced
from tests.support import distance
from wholebatch.window.precision import choose


class Words(nn.Module):
    """An embedding, a normalised layer, and an output that is tied to the embedding, or not."""

    def __init__(self, *, tied: bool, twice: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.twice = twice
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 8)
        self.read = nn.Linear(8, 11, bias=not tied)
        if tied:
            self.read.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.twice:
            x = x + self.embed(tokens.flip(1)).sin()
        logits: Tensor = self.read(self.norm(self.mix(x)))
        return logits


class Pictures(nn.Module):
    """Convolutions, three norms, a weight of its own, a slope, products of three and a bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(11, 8)
        self.first, self.last = nn.Conv1d(8, 8, 3, padding=1), nn.ConvTranspose1d(8, 8, 1)
        self.groups, self.root = nn.GroupNorm(2, 8), nn.RMSNorm(8)
        self.scale, self.slope = nn.Parameter(torch.randn(8)), nn.PReLU(8)
        self.experts = nn.Parameter(torch.randn(2, 8, 8))
        self.places = nn.Embedding(3, 8)
        self.read = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.root(self.embed(tokens)).transpose(1, 2)
        x = self.last(self.slope(self.groups(self.first(x)))).transpose(1, 2) * self.scale
        place = torch.arange(tokens.shape[1])
        near = (place[:, None] - place[None]).clamp(-1, 1) + 1
        x = x + self.places(near).mean(1)
        rows = x.flatten(0, 1).expand(2, -1, -1)
        logits: Tensor = self.read(torch.bmm(rows, self.experts).sum(0).view(x.shape))
        return logits


MODELS = {
    "tied": lambda: Words(tied=True),
    "untied": lambda: Words(tied=False),
    "tied, used twice": lambda: Words(tied=True, twice=True),
    "untied, used twice": lambda: Words(tied=False, twice=True),
    "others": Pictures,
}
FORMATS = [
    (torch.bfloat16, "full"),
    (torch.bfloat16, "bf16"),
    (torch.float16, "full"),
    (torch.float32, "bf16"),
    (torch.float64, "full"),
]
# Each model in three formats, and each format with three models.
CASES = [
    (kind, *FORMATS[(place + turn) % len(FORMATS)])
    for place, kind in enumerate(MODELS)
    for turn in range(3)
]


def _distances(model: nn.Module, precision: str) -> tuple[float, float]:
    """Return how far from float64 windows of the graph are, and plain torch undivided.

    Four windows, for the rounding of a single one scatters.
    """
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    train = traced(model, precision=precision, audit=False)
    ours: list[Tensor] = []
    undivided: list[Tensor] = []
    wanted: list[Tensor] = []
    for number in (0, 0, 1, 2):  # The last two rows get their graph when they come again.
        batch = tagged(10)
        batch["x"] = (batch["x"] + number) % 11
        for each in (model, plain, exact):
            each.zero_grad()
        mean_of_tokens(exact, batch).backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            mean_of_tokens(plain, batch).backward()
        train.gradient(batch)
        for gradients, each in ((ours, model), (undivided, plain), (wanted, exact)):
            gradients += [p.grad for p in each.parameters() if p.grad is not None]
    assert mode_of(train) == "operations", train._runner.executor.notes.reasons
    return distance(ours, wanted), distance(undivided, wanted)


@pytest.mark.parametrize(("kind", "dtype", "precision"), CASES)
def test_gradient_of_the_undivided_batch(kind: str, dtype: torch.dtype, precision: str) -> None:
    ours, undivided = _distances(MODELS[kind]().to(dtype), precision)
    assert ours <= (1e-12 if dtype is torch.float64 else 1.25 * undivided)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("trained", ["embed.", "mix."])
def test_frozen_parts(trained: str, dtype: torch.dtype) -> None:
    model = Words(tied=True, twice=True).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    ours, undivided = _distances(model, "full")
    assert ours <= (1e-12 if dtype is torch.float64 else 1.25 * undivided)


@pytest.mark.parametrize("words", [2, 11])  # Of 2, the rows add into several copies first.
def test_many_rows_of_one_word_add_up_in_fp32(words: int) -> None:
    """In bf16, what is added to a sum of more than 256 equal numbers is lost."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(words, 4, dtype=torch.bfloat16)

        def forward(self, tokens: Tensor) -> Tensor:
            rows: Tensor = self.embed(torch.zeros_like(tokens).expand(100, *tokens.shape))
            return rows

    def summed(model: nn.Module, micro: Micro) -> wb.Loss:
        return wb.Loss(model(micro["x"]).sum(), 1)

    _, _, (sums,) = run_rewritten(Counted(), summed, choose("full", "cpu"))
    assert sums.dtype is torch.float32
    assert sums[0].tolist() == [100 * 5 * 6 * 0.25] * 4
