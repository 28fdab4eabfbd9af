"""Transformers' Trainer, with and without wholebatch, on four models.

A model of one's own and BERT do not divide by `num_items_in_batch`; nor does T5. A Llama does, in
float32 also in a float64 model.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    __version__,
)

from compare.problem import (
    LEARNING_RATE,
    LENGTH,
    PROBLEMS,
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


def bert() -> BertForSequenceClassification:
    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,  # type: ignore[call-arg]
    )
    return BertForSequenceClassification(config).double()


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(5)
    config = T5Config(
        vocab_size=WORDS,
        d_model=16,
        d_ff=32,
        d_kv=8,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,  # type: ignore[call-arg]
        pad_token_id=0,
    )
    return T5ForConditionalGeneration(config).double()  # its norms compute in float32


class Classes(Tokens):
    """The same samples, with one label each."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index, 0].abs() % 3}


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
    data = (Classes if isinstance(model, BertForSequenceClassification) else Tokens)(problem)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(**arguments(problem, mode, folder, **options))
        kind(model=model, args=args, train_dataset=data).train()
    return flat(model)


def train(problem: Problem, mode: Mode) -> Tensor:
    """One epoch of the Trainer, with a model that does not take num_items_in_batch."""
    return train_model(ReaderForTokenClassification(), problem, mode)


def train_llama(problem: Problem, mode: Mode) -> Tensor:
    """One epoch of the Trainer, with one that does."""
    return train_model(llama(), problem, mode)


def train_bert(problem: Problem, mode: Mode) -> Tensor:
    """One epoch of the Trainer, with one that takes it and ignores it."""
    return train_model(bert(), problem, mode)


def train_bert_told(problem: Problem, mode: Mode) -> Tensor:
    """The same, and the Trainer is told that the model ignores it."""
    model: Any = bert()
    model.accepts_loss_kwargs = False
    return train_model(model, problem, mode)


def train_t5(problem: Problem, mode: Mode) -> Tensor:
    return train_model(t5(), problem, mode)


def rows() -> list[Row]:
    classes = [case for case in PROBLEMS if case != "masked tokens"]
    told = "Trainer, BERT, accepts_loss_kwargs=False"
    return [
        *rows_of("Trainer, Llama", __version__, train_llama, flat(llama()), precision="float32"),
        *rows_of("Trainer, BERT", __version__, train_bert, flat(bert()), cases=classes),
        *rows_of(told, __version__, train_bert_told, flat(bert()), cases=classes),
        *rows_of("Trainer, T5", __version__, train_t5, flat(t5()), precision="float32"),
        *rows_of("Trainer, a model of one's own", __version__, train, flat(Reader())),
    ]
