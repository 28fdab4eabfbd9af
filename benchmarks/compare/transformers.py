"""Transformers' Trainer, with and without wholebatch.

Two models: one in float64 whose forward does not take `num_items_in_batch`, as most that users
write do not, and GPT-2 in float32, which does, so that the Trainer's own counting of tokens works.
"""

from __future__ import annotations

import functools
import tempfile
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
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
    from_two_processes,
    loss_of,
    rows_of,
)
from compare.row import Row
from wholebatch.integrations.transformers import exact


class ReaderForTokenClassification(PreTrainedModel):
    """The model as Transformers wants it, with a loss of its own."""

    config_class = PretrainedConfig
    _tied_weights_keys: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        super().__init__(PretrainedConfig())
        self.reader = Reader()
        self.all_tied_weights_keys: dict[str, str] = {}

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.reader(input_ids)
        return {"loss": loss_of(logits, labels), "logits": logits}


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(5)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


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


def train_gpt2(problem: Problem, mode: Mode) -> Tensor:
    """One epoch of the Trainer, with one that does."""
    return train_model(gpt2(), problem, mode)


def rows() -> list[Row]:
    library = f"Transformers {__version__}"
    own_model = rows_of(
        library,
        train,
        flat(Reader()),
        in_two=functools.partial(from_two_processes, "transformers"),
        note="a model without num_items_in_batch",
    )
    with_count = rows_of(
        library,
        train_gpt2,
        flat(gpt2()),
        in_two=functools.partial(from_two_processes, "transformers", function="train_gpt2"),
        precision="float32",
        note="GPT-2, which takes num_items_in_batch",
    )
    return own_model + with_count
