"""Trainer adds the means of models that take **kwargs and ignore the number of items."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from wholebatch.integrations.transformers import exact  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def gradient_of(trainer_class: Any, folder: Path, *, micro_batches: int) -> torch.Tensor:
    """The update by plain SGD of one window of 16 equal samples, which is the gradient."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        num_labels=3,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    data = [
        {"input_ids": torch.randint(0, 50, (8,)), "labels": torch.tensor(one % 3)}
        for one in range(16)
    ]
    before = torch.cat([p.detach().clone().flatten() for p in model.parameters()])
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=16 // micro_batches,
        gradient_accumulation_steps=micro_batches, max_steps=1, max_grad_norm=0.0, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = trainer_class(
        model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None)
    )
    trainer.train()
    return before - torch.cat([p.detach().flatten() for p in model.parameters()])


def test_equal_micro_batches_of_a_classifier(tmp_path: Path) -> None:
    whole = gradient_of(transformers.Trainer, tmp_path, micro_batches=1)
    theirs = gradient_of(transformers.Trainer, tmp_path, micro_batches=4)
    ours = gradient_of(exact(transformers.Trainer), tmp_path, micro_batches=4)

    def error(found: torch.Tensor) -> float:
        return float((found - whole).norm() / whole.norm())

    assert error(ours) < 1e-5
    assert error(theirs) == pytest.approx(3.0, abs=1e-3)
