"""Gradients that add themselves: what the rewritten graph does, with a stand-in for the kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from tests.compile.nets import Tagger, loss, run_rewritten, tagged, trace_of
from tests.support import distance
from wholebatch.compile.fused_weight_grad import add_product
from wholebatch.compile.graph_inputs import take_apart
from wholebatch.compile.graph_rewrite import rewrite
from wholebatch.window.precision import choose


class StandIn(fx.Interpreter):
    """Runs the graph on a CPU, which has no kernel for fp32 sums of 16-bit products."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is add_product():
            buffer, left, right = args
            assert left.dtype is right.dtype is torch.bfloat16
            return buffer.add_(left.float() @ right.float())
        return super().call_function(target, args, kwargs)


class Turned(nn.Module):
    """Its weight is used as it is, not transposed: its gradient is Xᵀ dY."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(11, 8)
        self.weight = nn.Parameter(torch.randn(8, 11))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.embed(tokens) @ self.weight
        return logits


class Columns(Turned):
    """Its weight lies in memory by columns: autograd transposes the product dYᵀ X."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, 8).t())


class Twice(nn.Module):
    """Uses one layer twice: one cast for both, and two products that add into one buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(11, 11)
        self.layer = nn.Linear(11, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.layer(torch.tanh(self.layer(self.embed(tokens))))
        return logits


@pytest.mark.parametrize(
    ("model", "fused"),
    [(Tagger, (2, 1)), (Columns, (1, 1)), (Twice, (2, 1))],
)
def test_products_and_embeddings_add_themselves(
    model: type[nn.Module], fused: tuple[int, int]
) -> None:
    made, micro = model(), tagged(5)
    precision = choose("bf16", "cpu")
    with precision.forward():
        result = loss(made, micro)
    (result.total * 0.5).backward()
    inputs = take_apart(micro)
    traced = trace_of(made, loss, micro, precision)
    trained = list(traced.trained)
    dtypes = [torch.float32] * len(traced.used)
    rewritten = rewrite(traced, len(trained), dtypes, products=True)
    assert (rewritten.fused["products"], rewritten.fused["embeddings"]) == fused
    buffers = [torch.ones_like(trained[index]) for index in traced.used]  # not empty before
    with torch.no_grad():
        StandIn(rewritten.graph).run(
            *(parameter.detach() for parameter in trained),
            *(other.clone() for other in traced.others),
            *inputs.tensors,
            torch.tensor(0.5),
            *(trained[index].to(dtype) for index, dtype in rewritten.casts),
            *buffers,
        )
    found = [buffer - 1.0 for buffer in buffers]
    wanted = [trained[index].grad for index in traced.used]
    assert distance(found, wanted) <= 5e-3  # type: ignore[arg-type]
    assert all(gradient is not None for gradient in wanted)


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.waves, self.embed(tokens), use_reentrant=False)
        return result

    def waves(self, x: Tensor) -> Tensor:
        for _ in range(50):
            x = x.sin()
        return x


def test_what_checkpointing_computes_twice_is_not_stored() -> None:
    rewritten, _, _ = run_rewritten(_Checkpointed(), loss, choose("fp32", "cpu"))
    targets = [node.target for node in rewritten.graph.graph.nodes]
    assert targets.count(torch.ops.aten.sin.default) >= 98


class _Distances(nn.Module):
    """Attention with a learnt bias for each distance, as T5 has it: few rows, many indices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.bias = nn.Embedding(11, 8), nn.Embedding(3, 2)
        self.layer = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).unflatten(-1, (2, 4)).transpose(1, 2)
        place, length = torch.arange(48), tokens.shape[1]
        distance = (place[:, None] - place[None]).clamp(-1, 1) + 1
        bias = self.bias(distance)[:length, :length].permute(2, 0, 1).unsqueeze(0)
        assert bias.stride(-1) != 1
        mixed = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=bias)
        logits: Tensor = self.layer(mixed.transpose(1, 2).flatten(2))
        return logits


def test_many_indices_of_a_small_embedding_add_into_copies_of_it() -> None:
    model = _Distances().double()
    tokens = tagged(5)
    total = loss(model, tokens).total
    wanted = torch.autograd.grad(total * 0.25, list(model.parameters()))
    made, _, found = run_rewritten(model, loss, choose("full", "cpu"), held=1.0)
    assert distance(found, list(wanted)) <= 1e-12
    puts = [str(node.target) for node in made.graph.graph.nodes if "index_put" in str(node.target)]
    assert sorted(puts) == ["aten.index_put.default", "aten.index_put_.default"]
