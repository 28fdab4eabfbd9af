"""The update on a CUDA device equals that of the undivided batch, and no micro-batch waits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb

Micro = dict[str, Tensor]


class Tagger(nn.Module):
    """A small model over padded sequences of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.mix = nn.Linear(64, 64)
        self.read = nn.Linear(64, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.read(torch.tanh(self.mix(self.embed(tokens))))
        return logits


def fresh(dtype: torch.dtype, **options: Any) -> tuple[Tagger, torch.optim.SGD]:
    torch.manual_seed(0)
    model = Tagger().to("cuda", dtype)
    return model, torch.optim.SGD(model.parameters(), lr=1.0, **options)


def batch(samples: int = 19, length: int = 33) -> Micro:
    """On the host; the number of labels that count differs from sample to sample."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 50, (samples, length), generator=generator)
    labels = torch.randint(0, 50, (samples, length), generator=generator)
    counted = torch.randint(1, length, (samples, 1), generator=generator)
    return {"tokens": tokens, "labels": labels.masked_fill(torch.arange(length) >= counted, -100)}


def loss(model: nn.Module, micro: Micro) -> wb.Loss:
    return wb.cross_entropy(model(micro["tokens"]), micro["labels"])


def parameters_of(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().double()


def undivided(dtype: torch.dtype, clip_norm: float | None) -> Tensor:
    model, optimizer = fresh(dtype)
    before = parameters_of(model)
    whole = {name: tensor.cuda() for name, tensor in batch().items()}
    logits = model(whole["tokens"]).flatten(0, 1)
    functional.cross_entropy(logits, whole["labels"].flatten()).backward()
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    return parameters_of(model) - before


def error(update: Tensor, wanted: Tensor) -> float:
    return float((update - wanted).norm() / wanted.norm())


def whole_batch(dtype: torch.dtype, clip_norm: float | None, **options: Any) -> Tensor:
    model, optimizer = fresh(dtype, **options)
    before = parameters_of(model)
    train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=4, clip_norm=clip_norm)
    step = train.step(batch())
    assert step.micro_batches == 5
    return parameters_of(model) - before


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_fused_sgd() -> None:
    """It steps before the host has read the window: as near to float64 as the whole batch."""
    for clip_norm in (None, 0.05):
        wanted = undivided(torch.float64, clip_norm)
        allowed = 1.25 * error(undivided(torch.float32, clip_norm), wanted)
        assert error(whole_batch(torch.float32, clip_norm, fused=True), wanted) <= allowed


def test_no_micro_batch_waits_for_the_host() -> None:
    """Units on the device: only the close reads from it."""
    model, optimizer = fresh(torch.float32)
    acc = wb.Accumulator(model, optimizer, steps=5)
    micros = wb.split({name: tensor.cuda() for name, tensor in batch().items()}, 4)
    for micro in (*micros, *micros):  # windows 1 and 2 are tested, and the test reads numbers
        acc.backward(loss(model, micro))
    assert acc.updates == 2
    acc.backward(loss(model, micros[0]))
    torch.cuda.synchronize()
    with waiting_is_an_error():
        for micro in micros[1:4]:
            assert acc.backward(loss(model, micro)) is None
    assert acc.backward(loss(model, micros[4])) is not None


def test_memory_is_that_of_the_micro_batch() -> None:
    peaks = {}
    for micro_batch in (256, 16):
        model, optimizer = fresh(torch.float32)
        train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=micro_batch)
        whole = batch(samples=256, length=512)
        for _ in range(2):  # The first two windows are tested.
            train.step(whole)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        at_rest = torch.cuda.memory_allocated()
        train.step(whole)
        peaks[micro_batch] = torch.cuda.max_memory_allocated() - at_rest
        del model, optimizer, train
    assert peaks[16] < 0.15 * peaks[256], peaks
