"""TRL's SFTTrainer, with and without wholebatch; a Llama in float32."""

from __future__ import annotations

import functools
import tempfile

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
    from_two_processes,
    rows_of,
)
from compare.row import Row
from compare.transformers import arguments, llama
from wholebatch.integrations.transformers import exact


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{index}": index for index in range(WORDS)}
    inner = Tokenizer(WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", eos_token="w1")


def train(problem: Problem, mode: Mode) -> Tensor:
    """One epoch of SFTTrainer."""
    tokens = Tokens(problem)
    columns = {"input_ids": tokens.tokens.tolist(), "labels": tokens.labels.tolist()}
    model = llama()
    kind = exact(SFTTrainer) if mode == "ours" else SFTTrainer
    with tempfile.TemporaryDirectory() as folder:
        options = arguments(problem, mode, folder)
        args = SFTConfig(**options, max_length=LENGTH, gradient_checkpointing=False, bf16=False)
        kind(
            model=model,
            args=args,
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer(),
        ).train()
    return flat(model)


def rows() -> list[Row]:
    return rows_of(
        f"TRL {__version__} SFTTrainer",
        train,
        flat(llama()),
        in_two=functools.partial(from_two_processes, "trl"),
        precision="float32",
        note="a Llama, which takes num_items_in_batch",
    )
