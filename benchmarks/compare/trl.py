"""TRL's SFTTrainer, with and without wholebatch; a Llama in float32."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from trl import __version__
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from compare.problem import (
    LENGTH,
    WORDS,
    Mode,
    Problem,
    Tokens,
    flat,
    rows_of,
)
from compare.row import Row
from compare.transformers import arguments, llama
from wholebatch.integrations.transformers import exact


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{index}": index for index in range(WORDS)}
    inner = Tokenizer(WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", eos_token="w1")


def trainer_of(model: Any, problem: Problem, mode: Mode, folder: str, **options: Any) -> Any:
    """SFTTrainer on this problem, with `samples`, `optimizer`, `saves` and options of `exact`."""
    tokens = Tokens(problem)
    samples, optimizer = options.pop("samples", len(tokens)), options.pop("optimizer", None)
    saves = {"save_strategy": "steps"} if options.pop("saves", False) else {}
    kind = exact(SFTTrainer, **options) if mode == "ours" else SFTTrainer
    given = arguments(problem, mode, folder, **saves)
    columns = {
        "input_ids": tokens.tokens[:samples].tolist(),
        "labels": tokens.labels[:samples].tolist(),
    }
    own: dict[str, Any] = {}
    if optimizer is not None:
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        own["optimizers"] = (optimizer, constant)
    return kind(
        model=model,
        args=SFTConfig(**given, max_length=LENGTH, gradient_checkpointing=False, bf16=False),
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer(),
        **own,
    )


def train(problem: Problem, mode: Mode) -> Tensor:
    """One epoch of SFTTrainer."""
    model = llama()
    with tempfile.TemporaryDirectory() as folder:
        trainer_of(model, problem, mode, folder).train()
    return flat(model)


def rows() -> list[Row]:
    return rows_of(
        f"TRL {__version__} SFTTrainer",
        train,
        flat(llama()),
        precision="float32",
        note="a Llama, which takes num_items_in_batch",
    )
