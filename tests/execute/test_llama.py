"""Models of the Llama family: what the rewritten graph computes, in float64, and what it calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import wholebatch as wb
from tests.support import distance
from wholebatch.compile.fused_weight_grad import add_product
from wholebatch.compile.gradient_buffers import as_one, in_one_piece
from wholebatch.compile.graph_inputs import take_apart
from wholebatch.compile.graph_rewrite import Fusions, Rewritten, rewrite
from wholebatch.compile.trace import Form, State, Traced, trace
from wholebatch.core.precision import choose

transformers = pytest.importorskip("transformers")


def _model(**options: Any) -> nn.Module:
    """Two layers with grouped heads and tied weights; Qwen2 has biases at queries, keys, values."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config = transformers.Qwen2Config(**sizes, **heads, use_cache=False, **options)
    model: nn.Module = transformers.Qwen2ForCausalLM(config)
    return model


def _loss(model: Any, batch: Any) -> wb.Loss:
    return wb.mean_loss(model(**batch).loss, (batch["labels"][:, 1:] != -100).sum())


def _micro(*, padded: bool = False) -> dict[str, Tensor]:
    tokens = torch.randint(0, 64, (3, 8), generator=torch.Generator().manual_seed(1))
    mask = {"attention_mask": torch.ones_like(tokens)} if padded else {}
    return {"input_ids": tokens, "labels": tokens, **mask}


def _traced(model: nn.Module, micro: dict[str, Tensor]) -> tuple[Traced, State, list[Tensor]]:
    precision, inputs = choose("bf16", "cpu"), take_apart(micro)
    state = State.of(model, list(model.parameters()))
    with precision.forward():
        form = Form.of(_loss(model, micro), "loss")
    return trace(model, _loss, precision, state, inputs, form, "loss"), state, inputs.tensors


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
    traced: Traced, state: State, tensors: list[Tensor], options: Fusions
) -> tuple[Rewritten, list[Tensor]]:
    """What the rewritten graph adds to buffers of ones, less these."""
    trained = [one.detach().double() for one in state.trained.values()]
    rewritten = rewrite(traced, len(trained), [torch.float32] * len(traced.used), options)
    sources = [trained[index] for index, _ in rewritten.casts]
    casts = in_one_piece(sources, [torch.float64] * len(sources))
    buffers = in_one_piece(
        [trained[index] for index in traced.used], [torch.float64] * len(trained)
    )
    torch._foreach_copy_(casts, sources)
    torch._foreach_add_(buffers, 1.0)
    tail = [*casts, *buffers]
    joined = [as_one([tail[place] for place in places]) for places in rewritten.joined]
    others = [one.double() if one.is_floating_point() else one for one in state.others.values()]
    seed = torch.tensor(0.25, dtype=torch.float64)
    with torch.no_grad():
        InFloat64(rewritten.graph).run(*trained, *others, *tensors, seed, *tail, *joined)
    return rewritten, [buffer - 1.0 for buffer in buffers]


def test_the_rewritten_graph_makes_the_same_gradients() -> None:
    given = _traced(_model(), _micro())
    _, plain = _gradients(*given, Fusions(products=True))
    all_of_them = Fusions(products=True, norms=True, shared_inputs=True)
    rewritten, found = _gradients(*given, all_of_them)
    assert rewritten.fused_norms == 5
    assert rewritten.shared_products == 2 * (2 + 1)
    assert distance(found, plain) <= 1e-12
    assert all(bool(one.abs().sum() > 0) for one in found)
    called = [node.target for node in rewritten.graph.graph.nodes]
    products = [called.count(one) for one in (torch.ops.aten.mm.default, add_product())]
    # Of each layer 4 products, with 2 of their gradients each; the output layer, tied to tokens.
    assert products == [2 * (3 + 4) + 2, 2 * 4 + 1]
    exact = _model().double()
    _loss(exact, _micro()).total.mul(0.25).backward()
    wanted = [one.grad for one in exact.parameters()]
    # The model normalises and rotates in float32, whatever its dtype is.
    assert distance(found, [one for one in wanted if one is not None]) <= 1e-6
