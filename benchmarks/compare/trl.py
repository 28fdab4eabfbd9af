"""TRL's SFTTrainer, with and without wholebatch; a Llama in float32."""

from __future__ import annotations

import functools
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

from compare import laws
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
from compare.transformers import Stop, arguments, llama
from wholebatch.errors import NonFiniteError
from wholebatch.integrations.transformers import exact
from wholebatch.options import Close


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


# The cases beside the split, on two windows of four micro-batches.
WINDOWS = Problem(32)
MANY = 256


def spoiled() -> Any:
    """A Llama that gives NaN for one sample of the second window.

    Its embeddings do: SFTTrainer computes the loss itself, so a NaN in the model's own loss would
    never be seen.
    """
    model, sample = llama(), Tokens(WINDOWS).tokens[22]

    def spoil(_: Any, given: Any, embedded: Tensor) -> Tensor:
        return embedded * torch.nan if (given[0] == sample).all(-1).any() else embedded

    model.get_input_embeddings().register_forward_hook(spoil)
    return model


def trained(model: Any, mode: Mode, **options: Any) -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        trainer_of(model, WINDOWS, mode, folder, **options).train()
    return flat(model)


def error(got: Tensor, want: Tensor) -> float | str:
    return laws.distance(got, want, flat(llama()))


def _nan(library: str) -> Row:
    """A NaN in the second window: what was trained beside the first window alone."""
    first = trained(llama(), "whole", samples=16)
    own = error(trained(spoiled(), "own"), first)
    ours = error(trained(spoiled(), "ours", close=Close(nonfinite="skip")), first)
    try:
        trained(spoiled(), "ours")
        ours = "NaN"  # it must raise
    except NonFiniteError:
        pass
    return Row(library, "NaN", own, ours, "float32", 'nonfinite="skip"; raises by default')


def _resume(library: str) -> Row:
    """Two windows, left and gone on with in the middle of the second."""
    whole = trained(llama(), "whole")

    def found(mode: Mode) -> float | str:
        with tempfile.TemporaryDirectory() as folder:
            for checkpoint in (None, f"{folder}/checkpoint-1"):
                model = llama()
                trainer = trainer_of(model, WINDOWS, mode, folder, saves=True)
                if checkpoint is None:
                    trainer.add_callback(Stop())
                trainer.train(resume_from_checkpoint=checkpoint)
        return error(flat(model), whole)

    note = "saved after 6 of 8 micro-batches, in the second window"
    return Row(library, "resume", found("own"), found("ours"), "float32", note)


def _in_16_bit(library: str) -> Row:
    """The gradient of 256 micro-batches in bf16, beside their sum in float64."""
    problem = Problem(2 * MANY, micro_batch=2, steps=MANY)
    truth = _summed(problem)

    def found(mode: Mode) -> float | str:
        model, seen = llama().bfloat16(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(
            lambda *_: seen.append(
                torch.cat([p.grad.flatten().double() for p in model.parameters()])  # type: ignore[union-attr]
            )
        )
        with tempfile.TemporaryDirectory() as folder:
            trainer_of(model, problem, mode, folder, optimizer=optimizer).train()
        return laws.distance(seen[0], truth)

    note = "the gradient, beside its sum in float64"
    return Row(library, "bf16 × 256", found("own"), found("ours"), "bf16", note)


def _summed(problem: Problem) -> Tensor:
    """The sum in float64 of the gradients that SFTTrainer's loss gives for the micro-batches.

    The model's own loss would not do: SFTTrainer has an LM head of its own, which rounds a few
    elements of these gradients to the other side (1e-5 of the sum).
    """
    tokens, model = Tokens(problem), llama().bfloat16()
    parameters = list(model.parameters())
    truth = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(model, problem, "own", folder)
    for part in torch.arange(problem.samples).split(problem.micro_batch):
        ids = tokens.tokens[part]
        inputs = {"input_ids": ids, "labels": tokens.labels[part]}
        mean = trainer.compute_loss(model, {**inputs, "attention_mask": torch.ones_like(ids)})
        grads = torch.autograd.grad(mean / problem.steps, parameters)
        truth += torch.cat([grad.flatten().double() for grad in grads])
    return truth


def rows() -> list[Row]:
    library = f"TRL {__version__} SFTTrainer"
    split = rows_of(
        library,
        train,
        flat(llama()),
        in_two=functools.partial(from_two_processes, "trl"),
        precision="float32",
        note="a Llama, which takes num_items_in_batch",
    )
    return [*split, _in_16_bit(library), _nan(library), _resume(library)]
