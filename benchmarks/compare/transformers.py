"""Transformers' Trainer, with and without wholebatch.

Two models: one in float64 whose forward does not take `num_items_in_batch`, as most that users
write do not, and a Llama in float32, which does: there the Trainer's own counting works.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    __version__,
)

from compare.problem import (
    LEARNING_RATE,
    LENGTH,
    WORDS,
    Mode,
    Problem,
    Reader,
    Tokens,
    flat,
    loss_of,
    rows_of,
)
from compare.row import Row
from wholebatch.integrations.transformers import exact


class ReaderForTokenClassification(PreTrainedModel):
    """The model as Transformers wants it, with a loss of its own."""

    config_class = PretrainedConfig

    def __init__(self) -> None:
        super().__init__(PretrainedConfig())
        self.reader = Reader()
        self.all_tied_weights_keys: dict[str, str] = {}

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.reader(input_ids)
        return {"loss": loss_of(logits, labels), "logits": logits}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


def arguments(problem: Problem, mode: Mode, folder: str, **options: Any) -> dict[str, Any]:
    size, steps = problem.batches(mode)
    return {
        "output_dir": folder,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": steps,
        "max_grad_norm": problem.clip_norm or 0.0,
        "num_train_epochs": 1,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        **options,
    }


def train_model(model: Any, problem: Problem, mode: Mode, **options: Any) -> Tensor:
    kind = exact(Trainer) if mode == "ours" else Trainer
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(**arguments(problem, mode, folder, **options))
        kind(model=model, args=args, train_dataset=Tokens(problem)).train()
    return flat(model)


def train(problem: Problem, mode: Mode) -> Tensor:
    """One epoch of the Trainer, with a model that does not take num_items_in_batch."""
    return train_model(ReaderForTokenClassification(), problem, mode)


def train_llama(problem: Problem, mode: Mode) -> Tensor:
    """One epoch of the Trainer, with one that does."""
    return train_model(llama(), problem, mode)


def rows() -> list[Row]:
    library = f"Transformers {__version__}"
    own_model = rows_of(
        library,
        train,
        flat(Reader()),
        note="a model without num_items_in_batch",
    )
    with_count = rows_of(
        library,
        train_llama,
        flat(llama()),
        precision="float32",
        note="a Llama, which takes num_items_in_batch",
    )
    return [*own_model, *with_count]
