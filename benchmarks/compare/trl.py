"""TRL's trainers, with and without wholebatch, on a Llama in float32 (DPO and others: float64)."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast
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
from tests.integrations import trl_training as runs
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


def preference(name: str, samples: int) -> tuple[float, float]:
    """Return the errors of one update of DPO, KTO, Reward or GRPO, in 4 batches."""
    runs.SAMPLES = samples
    make = runs.TRAINERS[name]

    def update(kind: Any, batches: int) -> Tensor:
        if name == "GRPO":  # it generates its samples, in float32
            return runs.trained(make(kind, batches))
        model = runs.llama()
        if name == "Reward":
            model = runs.llama(LlamaForSequenceClassification, num_labels=1)
        return runs.trained(make(kind, batches, model=runs.in_float64(model)))

    whole = update(exact, 1)
    theirs = runs.off(update(lambda kind: kind, 1), whole)
    assert theirs < 1e-5, f"{name}: {theirs} from TRL's own undivided batch"  # it scores in float32
    return runs.off(update(lambda kind: kind, 4), whole), runs.off(update(exact, 4), whole)


def rows() -> list[Row]:
    rows = rows_of("SFTTrainer, Llama", __version__, train, flat(llama()), precision="float32")
    for name in runs.TRAINERS:
        precision = "float64" if name == "Reward" else "float32"  # TRL's losses are in float32
        sizes = {"equal": 16} if name == "GRPO" else {"equal": 16, "uneven": 14}
        for case, samples in sizes.items():
            errors = preference(name, samples)
            rows.append(Row(f"{name}Trainer", __version__, case, *errors, precision))
    return rows
