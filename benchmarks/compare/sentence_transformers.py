"""SentenceTransformerTrainer with in-batch negatives, beside the undivided batch."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import (  # type: ignore[attr-defined]
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    __version__,
    losses,
)
from torch import Tensor, nn

from compare.problem import LEARNING_RATE, PROBLEMS, Mode, Problem, flat, rows_of
from compare.row import Row

WORDS = 40


class Bag(nn.Module):
    """The mean of word vectors: a sentence is numbers between spaces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(WORDS, 16).double()

    def tokenize(self, texts: list[str], **_: Any) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([[int(word) for word in text.split()] for text in texts])}

    preprocess = tokenize

    def forward(self, features: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
        features["sentence_embedding"] = self.words(features["input_ids"]).mean(1)
        return features

    def save(self, *_: Any, **__: Any) -> None:
        pass


def pairs(problem: Problem) -> Dataset:
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, WORDS, (problem.samples, 2, 6), generator=draw)
    texts = [[" ".join(map(str, half)) for half in pair] for pair in tokens.tolist()]
    return Dataset.from_dict({"anchor": [a for a, _ in texts], "positive": [b for _, b in texts]})


def train(problem: Problem, mode: Mode) -> Tensor:
    """One epoch with MultipleNegativesRankingLoss."""
    size, steps = problem.batches(mode)
    model = SentenceTransformer(modules=[Bag()], device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        SentenceTransformerTrainer(
            model=model,
            args=SentenceTransformerTrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=steps,
                max_grad_norm=0.0,
                num_train_epochs=1,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                optim="sgd",
                train_sampling_strategy="sequential",
                use_cpu=True,
                disable_tqdm=True,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
            ),
            train_dataset=pairs(problem),
            loss=losses.MultipleNegativesRankingLoss(model),
        ).train()
    return flat(model)


def rows() -> list[Row]:
    start = flat(SentenceTransformer(modules=[Bag()], device="cpu"))
    trainer = "SentenceTransformerTrainer, MultipleNegativesRankingLoss"
    cases = [case for case in PROBLEMS if case in ("equal", "uneven", "short tail")]
    return rows_of(trainer, __version__, train, start, cases=cases, with_ours=False)
