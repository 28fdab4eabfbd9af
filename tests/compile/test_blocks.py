"""Layers that are alike are compiled once, and make the update of the undivided batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import wholebatch as wb
from tests.compile.nets import loss, mean_of_tokens, mode_of, steps_of, tagged
from tests.support import Seen, Whole, sgd
from wholebatch.compile import joint_graph
from wholebatch.compile.repeated_blocks import BlockProgram, Piece


class Layer(nn.Module):
    """Attention and a perceptron, each on normalised input and added to it."""

    def __init__(self, width: int, inner: int, scale: float, dropout: float, rank: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.drop = nn.Dropout(dropout)
        self.scale = scale
        self.low = nn.ModuleList()
        if rank:
            self.requires_grad_(False)
            self.low.extend([nn.Linear(width, rank, bias=False), nn.Linear(rank, inner)])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unsqueeze(1).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.scale * self.mix(mixed.squeeze(1))
        normed = self.norms[1](x)
        inner = self.up(normed)
        if self.low:
            inner = inner + self.low[1](self.low[0](normed))
        added: Tensor = self.drop(self.down(functional.gelu(inner)))
        return x + added


class Deep(nn.Module):
    """A language model of `depth` layers with tied embeddings."""

    def __init__(
        self,
        depth: int,
        *,
        inner: Callable[[int], int] = lambda _: 16,
        scale: Callable[[int], float] = lambda _: 0.5,
        dropout: float = 0.0,
        rank: int = 0,
        shared: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        made = [Layer(8, inner(i), scale(i), dropout, rank) for i in range(depth)]
        self.layers = nn.ModuleList(made[:1] * depth if shared else made)
        self.norm = nn.LayerNorm(8)
        self.read = nn.Linear(8, 11, bias=False)
        self.read.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(8, dtype=torch.float64))
        self.seen: Tensor

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        with torch.no_grad():
            self.seen.add_(x.sum((0, 1)))
        logits: Tensor = self.read(self.norm(x))
        return logits


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of operations of each piece; the pieces run as traced."""
    found: list[int] = []

    def as_traced(graph: Any, arguments: Any, **_: Any) -> Any:
        found.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph

    monkeypatch.setattr(joint_graph, "compiled_by_inductor", as_traced)
    return found


def blocks_of(train: wb.WholeBatch) -> BlockProgram:
    joint = next(iter(steps_of(train).values())).joint
    assert isinstance(joint._run, BlockProgram)
    return joint._run


def compiled(program: BlockProgram) -> int:
    """The number of pieces that were compiled."""
    return len({id(call.run) for call in program.calls})


def trained(model: nn.Module, numbers: Sequence[int], **options: Any) -> wb.WholeBatch:
    """A model after uneven windows, each of which made the update of the undivided batch."""
    whole = Whole(model, loss=mean_of_tokens, clip_norm=0.2)
    optimizer = sgd(model)
    seen = Seen(model, optimizer)
    train = wb.WholeBatch(
        model, optimizer, loss=loss, micro_batch=3, clip_norm=0.2, execute="compile", **options
    )
    for number in numbers:
        whole.step(tagged(number))
        train.step(tagged(number))
    whole.assert_same(model, seen, 1e-12)
    return train


KINDS: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "alike": (Deep, 5),
    "one layer is wider": (lambda depth: Deep(depth, inner=lambda i: 24 if i == 3 else 16), 7),
    "low rank": (lambda depth: Deep(depth, rank=2), 5),
    "one shared layer": (lambda depth: Deep(depth, shared=True), 5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_are_alike_are_compiled_once(kind: str, compilations: list[int]) -> None:
    build, distinct = KINDS[kind]
    wider = kind == "one layer is wider"
    train = trained(build(6 if wider else 4).double(), (6, 8, 6, 7, 5) if wider else (6, 9, 6))
    program = blocks_of(train)
    assert compiled(program) <= distinct, compilations
    assert len(program.calls) > 8
    if not wider:  # one size: tracing takes all the time
        return
    # The graph of open sizes too.
    joints = {id(step.joint): step.joint for step in steps_of(train).values()}
    assert [one.sizes is not None for one in joints.values()] == [False, True]
    assert all(len(one._run.calls) > 8 for one in joints.values())  # type: ignore[attr-defined]


def test_layers_with_different_constants_are_not_taken_for_each_other(
    compilations: list[int],
) -> None:
    trained(Deep(4, scale=lambda i: 1.0 / (i + 1)).double(), (6, 9, 6))
    assert compilations


class Drop(nn.Module):
    """Adds a dropped vector of ones, on average as it is, to its input."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, dtype=torch.float64))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        one: Tensor = self.weight
        for _ in range(6):
            one = one.sin().tanh()
        return x + functional.dropout(torch.ones_like(x) + one, self.dropout)


def spread(model: nn.Module, micro: Tensor) -> wb.Loss:
    """The variance of the mean of all layers: 1 if all drop the same, 1 / layers if not."""
    mean = model(micro) / 8 - 1.0
    return wb.Loss((mean**2).sum(), mean.numel())


def drops_fresh_numbers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Drop() for _ in range(8)))
    train = wb.WholeBatch(model, sgd(model), loss=spread, micro_batch=4, execute="compile")
    losses = [train.step(torch.zeros(8, 64, dtype=torch.float64)).loss for _ in range(4)]
    assert len(blocks_of(train).calls) > 8
    assert mode_of(train) == "compile"
    assert all(0.06 < float(one) < 0.2 for one in losses)  # 1 / 8 on average.
    assert len({float(one) for one in losses}) == 4


def test_every_layer_drops_other_numbers(compilations: list[int]) -> None:
    drops_fresh_numbers()
    assert len(compilations) <= 6


@pytest.mark.slow
def test_every_layer_drops_other_numbers_when_compiled() -> None:
    with warnings.catch_warnings():  # Warnings of the compiler are its own.
        warnings.simplefilter("default")
        drops_fresh_numbers()


@pytest.mark.slow
def test_compiled_blocks_make_the_update_of_the_undivided_batch() -> None:
    """Small layers of one size: compiling takes all the time."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64).double(), Drop(0.0)) for _ in range(8)]
    model = nn.Sequential(*layers)
    whole = Whole(model, loss=lambda m, x: (m(x) / 8 - 1.0).square().mean(), clip_norm=0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        train = wb.WholeBatch(
            model, sgd(model), loss=spread, micro_batch=3, clip_norm=0.2, execute="compile"
        )
        for number in (6, 9, 6):
            x = torch.randn(number, 64, dtype=torch.float64)
            whole.step(x)
            train.step(x)
    assert mode_of(train) == "compile"
    assert compiled(blocks_of(train)) <= 6
    whole.assert_same(model)


def test_a_piece_is_tried_on_zeros_if_its_operations_take_any_numbers() -> None:
    given = []

    def run(inputs: list[Any]) -> list[Any]:
        given.extend(inputs)
        return [inputs[0].index_select(0, inputs[1])]

    graph = fx.Graph()
    values = [torch.ones(1, 2).expand(3, 2), torch.ones(4, dtype=torch.int64), 7]
    inputs = [graph.placeholder(f"input_{number}") for number in range(3)]
    for node, value in zip(inputs, values, strict=True):
        node.meta["val"] = value
    chosen = graph.call_function(torch.ops.aten.index_select.default, (inputs[0], 0, inputs[1]))
    piece = Piece([chosen], inputs)
    assert piece.is_safe
    piece.try_out(run)
    assert not given[0].any()
    assert given[0].stride() == (0, 1)
    assert not given[1].any()
    assert given[2] == 7
    foreign = graph.call_function(torch.ops.quantized.linear.default)
    assert not Piece([chosen, foreign], inputs).is_safe
