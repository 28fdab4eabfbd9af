"""Parts of the Llama family: what the rewritten graph computes, in float64, and what it calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import wholebatch as wb
from tests.compile.nets import trace_of
from tests.support import distance
from wholebatch.compile.fused_weight_grad import add_product
from wholebatch.compile.gradient_buffers import Casts, Gradients, as_one, in_one_piece
from wholebatch.compile.graph_inputs import take_apart
from wholebatch.compile.graph_rewrite import Rewritten, rewrite
from wholebatch.compile.joint_graph import _rewritten
from wholebatch.compile.trace import Traced
from wholebatch.window.precision import choose


def _micro() -> dict[str, Tensor]:
    tokens = torch.randint(0, 64, (3, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def _traced(model: nn.Module, micro: dict[str, Tensor], loss: Any) -> tuple[Traced, list[Tensor]]:
    traced = trace_of(model, loss, micro, choose("bf16", "cpu"))
    return traced, list(take_apart(micro).tensors)


class InFloat64(fx.Interpreter):
    """Runs a graph with every cast between float dtypes made to float64."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is add_product():
            buffer, left, right = args
            return buffer.addmm_(left, right)

        def wide(part: Any) -> Any:
            is_float = isinstance(part, torch.dtype) and part.is_floating_point
            return torch.float64 if is_float else part

        kwargs = {name: wide(part) for name, part in kwargs.items()}
        return super().call_function(target, tuple(map(wide, args)), kwargs)


def _gradients(
    traced: Traced, tensors: list[Tensor], *, shares: bool = False
) -> tuple[Rewritten, list[Tensor]]:
    """What the rewritten graph adds to buffers of ones, less these."""
    trained = [one.detach().double() for one in traced.trained]
    dtypes = [torch.float32] * len(traced.used)
    rewritten = rewrite(traced, len(trained), dtypes, products=True, shares=shares)
    sources = [trained[index] for index, _ in rewritten.casts]
    casts = in_one_piece(sources, [torch.float64] * len(sources))
    buffers = in_one_piece(
        [trained[index] for index in traced.used], [torch.float64] * len(trained)
    )
    torch._foreach_copy_(casts, sources)
    torch._foreach_add_(buffers, 1.0)
    tail = [*casts, *buffers]
    joined = [as_one([tail[place] for place in places]) for places in rewritten.joined]
    read = [tail[place] for place in rewritten.read]
    others = [one.double() if one.is_floating_point() else one for one in traced.others]
    seed = torch.tensor(0.25, dtype=torch.float64)
    with torch.no_grad():
        InFloat64(rewritten.graph).run(*trained, *others, *tensors, seed, *read, *joined)
    return rewritten, [buffer - 1.0 for buffer in buffers]


def _mask(kind: str, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    place = torch.arange(tokens.shape[1])
    past = place[None, :] <= place[:, None]
    if kind == "bool":
        return past
    if kind == "near":
        return past & (place[:, None] - place[None, :] < 4)
    if kind == "later":
        return place[None, :] < place[:, None] + 2
    if kind == "data":
        return past & (tokens != 5)[:, None, None, :]
    hidden = {"infinite": float("-inf"), "lowest": torch.finfo(torch.float32).min, "low": -3.0}
    return torch.zeros(past.shape, dtype=dtype).masked_fill(~past, hidden[kind])


class Attends(nn.Module):
    """One attention over tokens, with a mask of some kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.embed = nn.Embedding(64, 16)
        self.read = nn.Linear(16, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)[:, None]
        mask = _mask(self.kind, input_ids, x.dtype)
        mixed = nn.functional.scaled_dot_product_attention(x, x.sin(), x.cos(), attn_mask=mask)
        logits = self.read(mixed[:, 0]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")


def _sum(model: Any, batch: Any) -> wb.Loss:
    return wb.Loss(model(**batch), batch["labels"].numel())


@pytest.mark.parametrize("kind", ["bool", "infinite", "lowest", "low", "near", "later", "data"])
def test_only_a_mask_that_always_is_causal_is_left_out(kind: str) -> None:
    model, micro = Attends(kind), _micro()
    given = _traced(model, micro, _sum)
    calls = [n for n in given[0].graph.graph.nodes if "attention_for_cpu.default" in str(n.target)]
    left_out = [len(node.args) == 5 and node.args[4] for node in calls]
    assert left_out == [kind in ("bool", "infinite", "lowest")]
    _, found = _gradients(*given)
    exact = model.double()
    _sum(exact, micro).total.mul(0.25).backward()
    assert distance(found, [one.grad for one in exact.parameters()]) <= 1e-12  # type: ignore[misc]


class Reads(nn.Module):
    """Pairs of layers on one input: applied twice, by themselves elsewhere, and with biases.

    The backward reads the result of one layer of `read_again`, and not that of the other.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 8)
        self.twice = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.apart = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.read_again = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.odd = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.read = nn.Linear(8, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        for _ in range(2):
            x = x + self.twice[0](x).sin() * self.twice[1](x)
        x = x + self.apart[0](x).sin() * self.apart[1](x)
        x = x + self.apart[1](x)
        x = x + self.read_again[0](x) + self.read_again[1](x).sin()
        x = x + self.odd[0](x).sin() * self.odd[1](x) * self.odd[2](x).cos()
        logits = self.read(x).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")


def test_layers_used_twice_and_biases_of_odd_sizes() -> None:
    model, micro = Reads(), _micro()
    given = _traced(model, micro, _sum)
    rewritten, found = _gradients(*given, shares=True)
    assert rewritten.fused["shared"] == 2 + 1 + 1 + 2
    # Weights and buffers; of layers that run more than once only the weights.
    assert len(rewritten.joined) == 1 + 1 + 2 + 2
    called = [node.target for node in rewritten.graph.graph.nodes]
    assert called.count(torch.ops.aten.clone.default) == 1
    exact = model.double()
    _sum(exact, micro).total.mul(0.25).backward()
    assert distance(found, [one.grad for one in exact.parameters()]) <= 1e-12  # type: ignore[misc]


def test_buffers_that_lie_apart_are_not_joined() -> None:
    model = Reads()
    traced, _ = _traced(model, _micro(), _sum)
    parameters = list(traced.trained)
    gradients = Gradients(parameters)
    buffers = gradients.of(traced.used)
    rewritten, tail = _rewritten(traced, gradients, Casts(parameters), products=True)
    assert len(tail) == len(rewritten.read) + len(rewritten.joined)
    assert rewritten.fused["shared"]
    # Two inputs that share memory would be one for a compiler, if one is written.
    written = {place for parts in rewritten.joined for place in parts}
    assert not {place for place in written if place >= len(rewritten.casts)} & {*rewritten.read}
    apart = Gradients(parameters)
    for index in traced.used:  # one allocation each
        apart.of([index])
    rewritten, tail = _rewritten(traced, apart, Casts(parameters), products=True)
    assert not rewritten.fused["shared"]
    assert len(tail) == len(rewritten.casts) + len(buffers)
