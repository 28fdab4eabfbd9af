"""Trainers as they are, without wholebatch: right where their loss is a mean over equal samples.

With another number of tokens in each sample, the mean of means of their micro-batches is found.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.split_invariance.planted_trainer import SAMPLES, Model, batch
from wholebatch.testing import assert_split_invariant

MEANS = "every micro-batch counts the same, whatever it holds: a mean of means"


def problem(even: bool) -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    tokens, labels = batch()
    return Model(), TensorDataset(tokens, tokens.flip(1) if even else labels)


def mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x, keeps_cast=False).flatten(0, 1), y.flatten())


def by_accelerate(micro_batch: int, even: bool) -> nn.Module:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)  # of the run before
    GradientState._reset_state()
    accelerator = Accelerator(gradient_accumulation_steps=SAMPLES // micro_batch, cpu=True)
    model, data = problem(even)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), DataLoader(data, micro_batch)
    )
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mean(model, x, y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model)


def by_lightning(micro_batch: int, even: bool) -> nn.Module:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, part: Any) -> Tensor:
            return mean(self.model, *part)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    model, data = problem(even)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    quiet["enable_model_summary"] = False
    trainer = lightning.Trainer(
        max_steps=1, accumulate_grad_batches=SAMPLES // micro_batch, accelerator="cpu", **quiet
    )
    trainer.fit(Module(model), DataLoader(data, micro_batch))
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["accelerate", "lightning"])
def test_a_trainer(name: str) -> None:
    pytest.importorskip(name)
    train: Any = {"accelerate": by_accelerate, "lightning": by_lightning}[name]
    assert_split_invariant(partial(train, even=True), (8, 4, 2))
    with pytest.raises(AssertionError, match=MEANS):
        assert_split_invariant(partial(train, even=False), (8, 4, 2))
