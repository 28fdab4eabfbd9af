"""Models of the Llama family: compiled micro-steps use our kernels, against float64."""

from __future__ import annotations

import unittest
import warnings
from typing import Any

import torch
from torch import Tensor

import wholebatch as wb
from wholebatch.compile import ExecuteWarning, joint_graph
from wholebatch.compile.graph_rewrite import Rewritten

DEVICE = torch.device("cuda")
LAYERS = 3


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def _model(kind: str, dtype: torch.dtype) -> Any:
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if kind == "Llama" else 1,
        "tie_word_embeddings": kind == "Qwen2",
        "use_cache": False,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(DEVICE, dtype)
    if kind == "Mixtral" and dtype is torch.float64:
        model.set_experts_implementation("eager")  # torch has no grouped product in float64
    return model


def _loss(model: Any, batch: Any) -> wb.Loss:
    return wb.mean_loss(model(**batch).loss, batch["labels"][:, 1:].numel())


def _gradient(kind: str, execute: str, dtype: torch.dtype) -> Tensor:
    """The gradient of seven sequences in micro-batches of two."""
    model = _model(kind, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kept: list[Tensor] = []

    def look(*_: object) -> None:
        grads = [one.grad for one in model.parameters() if one.grad is not None]
        kept.append(torch.cat([one.double().flatten() for one in grads]))

    optimizer.register_step_pre_hook(look)
    precision = "bf16" if dtype is torch.float32 else "full"
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=_loss,
        micro_batch=2,
        precision=precision,
        execute=execute,  # type: ignore[arg-type]
    )
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 512, (7, 160), generator=draw).to(DEVICE)
    for _ in range(3):
        train.step({"input_ids": tokens, "labels": tokens})
    if execute == "graph":
        executor = train._runner.executor
        assert executor.mode == "graph of compile", executor.notes.history
    return kept[-1]


def _compare(kind: str) -> list[Rewritten]:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise unittest.SkipTest("needs transformers") from None
    rewrite, made = joint_graph.rewrite, []

    def spy(*given: Any, **options: bool) -> Rewritten:
        made.append(rewrite(*given, **options))
        return made[-1]

    joint_graph.rewrite = spy
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.simplefilter("error", ExecuteWarning)
            exact = _gradient(kind, "eager", torch.float64)
            eager = _gradient(kind, "eager", torch.float32)
            graph = _gradient(kind, "graph", torch.float32)
    finally:
        joint_graph.rewrite = rewrite
    ours, theirs = _distance(graph, exact), _distance(eager, exact)
    print(f"  {kind}: graph {ours:.2e} from float64, eager code {theirs:.2e}")
    assert ours <= 1.25 * theirs
    return made


def _targets(one: Rewritten) -> str:
    return " ".join(str(node.target) for node in one.graph.graph.nodes)


def test_a_llama_uses_them() -> None:
    made = _compare("Llama")
    assert made
    for one in made:
        assert one.fused["shared"] == 3 * LAYERS
        assert "efficient_attention" not in _targets(one)  # It would need a mask.


def test_a_qwen_with_grouped_heads_biases_and_tied_weights_uses_them() -> None:
    made = _compare("Qwen2")
    assert made
    for one in made:
        assert one.fused["shared"] == 3 * LAYERS
        # Keys are not repeated for each of the four heads that read them.
        keys = {
            tuple(node.args[1].meta["val"].shape[1:])
            for node in one.graph.graph.nodes
            if "attention" in str(node.target) and "backward" not in str(node.target)
        }
        assert keys == {(1, 160, 64)}, keys


def test_the_experts_of_a_mixtral_are_recorded() -> None:
    made = _compare("Mixtral")
    assert made
    assert all("_grouped_mm" in _targets(one) for one in made)
