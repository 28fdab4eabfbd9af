"""Transformers' Trainer, with and without wholebatch.

Two models: one in float64 whose forward does not take `num_items_in_batch`, as most that users
write do not, and a Llama in float32, which does: there the Trainer's own counting works.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    __version__,
)

from compare import laws
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


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self.model, {"x": x, "y": y})}


class Stop(TrainerCallback):
    """Leaves in the middle of the second window, with a checkpoint."""

    seen = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen += 1
        if self.seen == 5:  # of three in every window
            control.should_save = control.should_training_stop = True


def trainer_of(
    model: Any, optimizer: Any, micros: Any, steps: int, loss: Any, mode: str, folder: str, **o: Any
) -> Any:
    samples = [
        {n: micro[n][at] for n in micro} for micro in micros for at in range(len(micro["y"]))
    ]
    ends = list(itertools.accumulate((len(micro["y"]) for micro in micros), initial=0))
    places = [list(range(*pair)) for pair in itertools.pairwise(ends)]

    class Given(Trainer):
        def get_train_dataloader(self) -> Any:
            data: Any = samples  # a list, so that a resumed run can skip to its place
            return DataLoader(data, batch_sampler=places)

    def units(inputs: Any) -> int:
        return len(inputs["y"])

    saves = o.pop("saves", False)
    kind = exact(Given, units=units, **o) if mode == "ours" else Given
    options = arguments(Problem(1, steps=steps), "own", folder)
    options["save_strategy"] = "steps" if saves else "no"
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return kind(
        model=WithLoss(model, loss),
        args=TrainingArguments(**options),
        train_dataset=micros,
        optimizers=(optimizer, constant),
    )


def run(
    model: Any, optimizer: Any, micros: Any, steps: int, loss: Any, mode: str, **o: Any
) -> None:
    """One epoch over these micro-batches."""
    with tempfile.TemporaryDirectory() as folder:
        trainer_of(model, optimizer, micros, steps, loss, mode, folder, **o).train()


def resume(mode: str) -> nn.Module:
    """Two windows, left and gone on with in the middle of the second."""
    micros = laws.windows_of()[0]
    with tempfile.TemporaryDirectory() as folder:
        for checkpoint in (None, f"{folder}/checkpoint-1"):
            model = laws.model_of()
            given = (model, laws.sgd(model), micros, laws.STEPS, laws.mean, mode, folder)
            trainer = trainer_of(*given, saves=True)
            if checkpoint is None:
                trainer.add_callback(Stop())
            trainer.train(resume_from_checkpoint=checkpoint)
    return model


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
        train_llama,
        flat(llama()),
        in_two=functools.partial(from_two_processes, "transformers", function="train_llama"),
        precision="float32",
        note="a Llama, which takes num_items_in_batch",
    )
    return [*own_model, *with_count, *laws.law_rows(library, run, resume)]
