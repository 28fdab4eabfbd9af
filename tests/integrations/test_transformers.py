"""Exact windows in Transformers' Trainer and TRL's, against training on undivided batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import wholebatch as wb
from tests.integrations.pages import changed_script, error, plain_script, weights, weights_here
from tests.support import EXACT
from wholebatch.errors import LossError, NonFiniteError, OptionError, UnsupportedError

pytest.importorskip("transformers")

from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

from wholebatch.integrations.transformers import exact
from wholebatch.options import Close

pytestmark = [
    pytest.mark.slow,
    # torch's scheduler is told of steps that another optimizer made; torch and TRL deprecate.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
SCRIPT = "transformers_trainer.py"
FLOAT32 = 1e-6


def labels_of(inputs: Any) -> Tensor:
    """The units of a loss that does not shift its labels."""
    return (inputs["labels"] != -100).sum()


def test_a_loss_that_the_trainer_miscounts(hosts: Any, problem: Any, tmp_path: Path) -> None:
    """GPT-2 shifts its labels, which the Trainer does not know; ours is the model's own mean."""
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0}
    config = GPT2Config(**sizes, **none, eos_token_id=0)
    torch.manual_seed(0)
    ours, plain = GPT2LMHeadModel(config), GPT2LMHeadModel(config)
    plain.load_state_dict(ours.state_dict())
    start = problem.flat(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=problem.LEARNING_RATE)
    for batch in DataLoader(problem.Tokens(problem.PROBLEMS["masked tokens"]), batch_size=16):
        plain(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained(hosts, problem, exact(Trainer), "ours", arguments={"folder": str(tmp_path)}, model=ours)
    assert problem.distance(problem.flat(ours), problem.flat(plain), start) <= FLOAT32


def test_a_loader_without_a_length(hosts: Any, problem: Any, tmp_path: Path) -> None:
    """The Trainer itself leaks the short last window of an epoch into the next one."""
    case = problem.PROBLEMS["masked tokens"]
    rows = [problem.Tokens(case)[at] for at in range(case.samples - 4)]

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(rows)

    class Own(Trainer):  # whose steps are the Trainer's own: its losses are weighted
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().training_step(*args, **kwargs)

    moved = []
    kinds: list[Any] = [Trainer, exact(Trainer), exact(Own), Trainer]
    for kind, mode in zip(kinds, ("whole", "ours", "ours", "ours"), strict=True):
        extra = {"max_steps": 4, "num_train_epochs": 9}
        args = TrainingArguments(**hosts.arguments(case, mode, str(tmp_path), **extra))
        model = hosts.ReaderForTokenClassification()
        kind(model=model, args=args, train_dataset=Stream()).train()
        moved.append(problem.flat(model))
    start = problem.flat(problem.Reader())
    assert problem.distance(moved[1], moved[0], start) <= EXACT
    assert problem.distance(moved[2], moved[0], start) <= EXACT
    assert problem.distance(moved[3], moved[0], start) > 0.01


def test_a_loss_of_ones_own_must_say_its_units(hosts: Any, problem: Any, tmp_path: Path) -> None:
    class PerSample(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            logits, labels = model(**inputs)["logits"], inputs["labels"]
            losses = nn.functional.cross_entropy(logits.mT, labels, reduction="none")
            return (losses.sum(1) / (labels != -100).sum(1).clamp(min=1)).mean()

    arguments = {"folder": str(tmp_path)}
    message = r"not one of Transformers' own \(compute_loss of .* Pass what it is a mean over"
    with pytest.raises(LossError, match=message):
        trained(hosts, problem, exact(PerSample), "ours", arguments=arguments)
    with pytest.raises(LossError, match=r"not one of Transformers' own \(compute_loss_func"):
        kind: Any = exact(Trainer)
        trained(hosts, problem, kind, "ours", arguments=arguments, compute_loss_func=mean_of)
    with pytest.raises(UnsupportedError, match=r"mean over other units|may count something"):
        kind = exact(PerSample, units=labels_of)
        trained(hosts, problem, kind, "ours", arguments=arguments)
    whole = trained(hosts, problem, PerSample, "whole", arguments=arguments)
    kind = exact(PerSample, units=lambda inputs: len(inputs["labels"]))
    ours = trained(hosts, problem, kind, "ours", arguments=arguments)
    assert distance(problem, ours, whole) <= EXACT


@pytest.mark.distributed
def test_the_pages_diff_on_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = weights_here(
        plain_script(SCRIPT), tmp_path, monkeypatch, "--micro-batch", "32", "--steps", "1"
    )
    ours = weights(changed_script("transformers.md", SCRIPT, tmp_path), tmp_path)
    assert error(ours, whole) <= EXACT
    assert error(weights_here(plain_script(SCRIPT), tmp_path, monkeypatch), whole) > 1e-4


def trained(hosts: Any, problem: Any, kind: type[Any], mode: str, **options: Any) -> Any:
    """A trainer that has made one epoch on masked tokens; `problem.flat(trainer.model)` it."""
    case = problem.PROBLEMS["masked tokens"]
    resume = options.pop("resume", None)
    args = TrainingArguments(**hosts.arguments(case, mode, **options.pop("arguments")))
    model = options.pop("model", None) or hosts.ReaderForTokenClassification()
    trainer = kind(model=model, args=args, train_dataset=problem.Tokens(case), **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def distance(problem: Any, trainer: Any, whole: Any) -> float:
    start = problem.flat(problem.Reader())
    found: float = problem.distance(problem.flat(trainer.model), problem.flat(whole.model), start)
    return found


def mean_of(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    assert num_items_in_batch is None
    return nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


def test_batches_cut_further_make_the_same_update(hosts: Any, problem: Any, tmp_path: Path) -> None:
    folder = {"folder": str(tmp_path), "max_grad_norm": 0.05}
    whole = trained(hosts, problem, Trainer, "whole", arguments=folder)
    ours = trained(hosts, problem, exact(Trainer, micro_batch=3), "whole", arguments=folder)
    assert distance(problem, ours, whole) <= EXACT
    assert ours._whole.micro_batch_size == 3
    assert trained(hosts, problem, exact(Trainer, micro_batch="auto"), "whole", arguments=folder)


class OwnStep(Trainer):
    """Makes its steps itself."""

    def training_step(self, *given: Any, **named: Any) -> Any:
        return super().training_step(*given, **named)


class Exploding(OwnStep):
    """Its gradient is not finite."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return (model(**inputs)["loss"] * 0.0).sqrt()


def test_where_the_trainer_makes_the_steps(hosts: Any, problem: Any, tmp_path: Path) -> None:
    folder = {"folder": str(tmp_path)}
    whole = trained(hosts, problem, Trainer, "whole", arguments=folder)
    ours = trained(hosts, problem, exact(OwnStep), "ours", arguments=folder)
    assert distance(problem, ours, whole) <= EXACT
    for options, message in (
        ({"micro_batch": 2}, "micro_batch=2 is not possible if the Trainer runs the steps"),
        (
            {"close": Close(nonfinite="skip")},
            r"close=Close\(.*nonfinite='skip'.* is not possible if the Trainer runs",
        ),
    ):
        with pytest.raises(OptionError, match=message):
            kind: Any = exact(OwnStep, **options)  # type: ignore[arg-type]
            trained(hosts, problem, kind, "ours", arguments=folder)
    with pytest.raises(NonFiniteError, match="the gradient of this window is not finite"):
        kind = exact(Exploding, units=labels_of, audit=False)
        trained(hosts, problem, kind, "ours", arguments=folder)
    half = hosts.ReaderForTokenClassification().bfloat16()
    with pytest.raises(UnsupportedError, match="16-bit parameters and steps by the Trainer itself"):
        trained(hosts, problem, exact(OwnStep), "ours", arguments=folder, model=half)
    with pytest.raises(UnsupportedError, match=r"optim=.*lomo updates within every backward"):
        ours.args.optim = "lomo"
        ours.train()


def test_what_is_refused(hosts: Any, problem: Any, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="or a class that descends from it"):
        exact(nn.Linear)
    with pytest.raises(OptionError, match="micro_batch=0: must be a positive number"):
        exact(Trainer, micro_batch=0)
    with pytest.raises(OptionError, match=r'without micro_batch=: .*"auto" too'):
        exact(Trainer, memory="1GiB")
    with pytest.raises(OptionError, match="which has its own units"):
        exact(Trainer, loss=wb.moe_loss(), units=len)
    with pytest.raises(OptionError, match="must be a function"):
        exact(Trainer, units=3)  # type: ignore[arg-type]
    trainer = exact(Trainer)(
        model=hosts.ReaderForTokenClassification(),
        args=TrainingArguments(**hosts.arguments(problem.PROBLEMS["equal"], "ours", str(tmp_path))),
    )
    with pytest.raises(LossError, match="no tensor of 'labels'"):
        trainer.count_units({"input_ids": torch.zeros(2, 3)})
    assert trainer.count_units({"labels": torch.zeros(2, 3)}) == 6  # a regression
    norm = hosts.ReaderForTokenClassification()
    norm.reader.mix = nn.Sequential(norm.reader.mix, nn.BatchNorm1d(8).double())
    with pytest.raises(UnsupportedError, match="BatchNorm"):
        trained(
            hosts,
            problem,
            exact(Trainer, batchnorm="refuse"),
            "ours",
            model=norm,
            arguments={"folder": str(tmp_path)},
        )
