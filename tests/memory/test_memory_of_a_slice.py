"""Training, with every test of the loss, in little more memory than a plain micro-step takes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.memory.inject import LimitedMemory
from wholebatch.compile.graph_check import GraphCheck
from wholebatch.memory.meter import MemoryMeter

ROWS, LENGTH = 8, 48


class Decoder(nn.Module):
    """Token embeddings, a few layers, and logits over a vocabulary."""

    def __init__(self, words: int, frozen: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 32)
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        self.head = nn.Linear(32, words)
        if frozen:  # as with LoRA: little is trained, so gradients take no memory
            self.embedding.requires_grad_(False)
            self.head.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        states = self.embedding(ids)
        for layer in self.layers:
            states = states + F.gelu(layer(states))
        logits: Tensor = self.head(states)
        return logits


def loss(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
    logits = model(micro["ids"]).flatten(0, 1)
    labels = micro["labels"].flatten()
    return wb.Loss(F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum())


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 64, (ROWS, LENGTH), generator=generator)
    labels = ids.roll(-1, 1)
    for row in range(ROWS):
        labels[row, : row * 5] = -100
    return {"ids": ids, "labels": labels}


def fresh(words: int, frozen: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Decoder(words, frozen).double()
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def plain_peak(words: int, frozen: bool, micro: int) -> int:
    """Return the peak of a plain loop over two micro-batches, the second with gradients there."""
    model, _ = fresh(words, frozen)
    data = batch()
    with MemoryMeter(model=model) as meter:
        for start in (0, micro):
            part = {name: leaf[start : start + micro] for name, leaf in data.items()}
            loss(model, part).total.backward()
    return meter.peak


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("words", [64, 2048])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_window_trains_in_the_memory_of_a_micro_step(
    words: int, frozen: bool, micro: int, caplog: pytest.LogCaptureFixture
) -> None:
    limit = int(1.15 * plain_peak(words, frozen, micro))
    reference, optimizer = fresh(words, frozen)
    data = batch()
    whole = loss(reference, data)
    (whole.total / whole.units).backward()
    optimizer.step()

    model, optimizer = fresh(words, frozen)
    train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=micro, execute="eager")
    with caplog.at_level(logging.WARNING), LimitedMemory(limit, model):
        train.step(data)
        for _ in range(4):  # windows 2 and 4 are tested, too
            train.step(data)
    assert train.recoveries == 0
    said: list[Any] = [r for r in caplog.records if "ran out of memory" in r.message]
    assert len(said) <= 1  # a size that does not fit is not tried again
    model, optimizer = fresh(words, frozen)
    wb.WholeBatch(model, optimizer, loss=loss, micro_batch=micro, execute="eager").step(data)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_a_graph_is_compared_in_the_memory_of_a_micro_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a model that is mostly frozen; else its gradients, set aside, lie beside it."""
    peaks = []
    compare = GraphCheck.compare

    def measured(*given: Any, **options: Any) -> None:
        with MemoryMeter(model=model) as meter:
            compare(*given, **options)
        peaks.append(meter.peak)

    monkeypatch.setattr(GraphCheck, "compare", measured)
    model, optimizer = fresh(2048, frozen=True)
    train = wb.WholeBatch(
        model, optimizer, loss=loss, micro_batch=2, execute="compile", audit=False
    )
    train._runner.executor._plan.compiles = False  # what a compiler makes of it needs less
    train.step(batch())
    assert train._runner.executor.mode == "operations", train._runner.executor.notes.reasons
    assert 0 < max(peaks) <= 1.15 * plain_peak(2048, True, 2)
