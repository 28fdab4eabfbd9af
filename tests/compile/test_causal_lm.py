"""Logits in slices: the same loss and gradients, and never all logits at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import wholebatch as wb
from tests.compile.nets import mode_of, steps_of, traced
from tests.support import EXACT, distance, sgd
from wholebatch.losses import sliced_cross_entropy

VOCABULARY = 13


@dataclass
class Output:
    last_hidden_state: Any = None
    logits: Any = None


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.mix = nn.Linear(6, 6)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return Output(last_hidden_state=torch.tanh(self.mix(self.embed(input_ids))))


class Model(nn.Module):
    """Shaped like a language model of Hugging Face; `bend` is what it does to its logits."""

    def __init__(self, *, bias: bool, bend: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.base_model = Body()
        self.head = nn.Linear(6, VOCABULARY, bias=bias)
        self.bend = bend

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        logits = self.head(self.base_model(input_ids, attention_mask).last_hidden_state)
        return Output(logits=logits if self.bend is None else self.bend(logits))


class Plain(nn.Module):
    """The same without a way to its hidden states."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.inner = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self.inner(input_ids, attention_mask)


def batch(samples: int = 5, length: int = 300) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (samples, length), generator=generator)
    mask = torch.arange(length) < torch.randint(9, length, (samples, 1), generator=generator)
    return {"input_ids": tokens, "attention_mask": mask.long()}


class Largest(TorchDispatchMode):
    """The most logits that were there at once."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() > 1 and out.shape[-1] == VOCABULARY:
            self.rows = max(self.rows, out.numel() // VOCABULARY)
        return out


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_cross_entropy, "rows_at_once", lambda _: 128)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("bias", [False, True])
def test_slices_give_the_same_loss_and_gradients(bias: bool) -> None:
    models = [Model(bias=bias).double(), Model(bias=bias).double()]
    largest = Largest()
    with largest:
        sliced = wb.causal_lm(models[0], batch())
        (sliced.total * 0.25).backward()
    plain = wb.causal_lm(Plain(models[1]), batch())
    (plain.total * 0.25).backward()
    assert largest.rows <= 128
    assert sliced.total.item() == pytest.approx(plain.total.item(), rel=1e-13)
    assert int(sliced.units) == int(plain.units)
    gradients = [[p.grad for p in model.parameters()] for model in models]
    assert distance(gradients[0], gradients[1]) <= EXACT  # type: ignore[arg-type]


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_slices_under_autocast_are_as_near_to_the_truth(dtype: torch.dtype) -> None:
    errors = []
    exact = Model(bias=True).double()
    (wb.causal_lm(Plain(exact), batch()).total / 1024).backward()
    for wrap in (lambda model: model, Plain):
        model = Model(bias=True)
        with torch.autocast("cpu", dtype=dtype):
            total = wb.causal_lm(wrap(model), batch()).total
        assert total.dtype is torch.float32
        (total / 1024).backward()
        wanted = [p.grad for p in exact.parameters()]
        errors.append(distance([p.grad for p in model.parameters()], wanted))  # type: ignore[arg-type, misc]
    assert errors[0] <= 1.25 * errors[1]


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize(
    "bend",
    [
        lambda logits: 3.0 * torch.tanh(logits / 3.0),
        lambda logits: torch.cat([logits[..., :5], logits[..., 5:]], dim=-1),
        lambda logits: logits + torch.arange(VOCABULARY).double(),
    ],
)
def test_logits_that_are_bent_afterwards_are_left_whole(bend: Callable[[Tensor], Tensor]) -> None:
    model = Model(bias=False, bend=bend).double()
    found = wb.causal_lm(model, batch())
    plain = wb.causal_lm(Plain(model), batch())
    assert float(found.total.detach()) == float(plain.total.detach())


@pytest.mark.usefixtures("small_slices")
def test_slices_within_the_traced_micro_step() -> None:
    models = [Model(bias=True).double(), Model(bias=True).double()]
    graph = traced(models[0], loss=wb.causal_lm)
    eager = wb.WholeBatch(
        Plain(models[1]), sgd(models[1]), loss=wb.causal_lm, micro_batch=4, execute="eager"
    )
    for _ in range(3):
        graph.step(batch(8))
        eager.step(batch(8))
    assert mode_of(graph) == "operations"
    assert distance(models[0].parameters(), models[1].parameters()) <= EXACT
    [step] = steps_of(graph).values()
    logits = [
        len(node.meta["val"])
        for node in step.joint.traced.graph.graph.nodes
        if node.target is torch.ops.aten.addmm.default and node.meta["val"].shape[-1] == VOCABULARY
    ]
    assert max(logits) <= 128
    targets = [node.target for node in step.joint._run.graph.nodes]  # type: ignore[attr-defined]
    slices = targets.count(torch.ops.aten._log_softmax.default)
    assert 2 * slices == len(logits)  # Each is made once, when the one before it is used up.
    assert targets.count(torch.ops.wholebatch.after.default) == slices - 1
