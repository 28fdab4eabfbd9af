"""`exact(Trainer)` through the machinery of WholeBatch: graphs, recovery, BatchNorm, Coupled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.launch import torchrun
from tests.memory.inject import OutOfMemoryAt
from tests.support import EXACT

pytest.importorskip("transformers")

from transformers import (
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.integrations.conftest import Traces
from tests.integrations.stops import Stop
from wholebatch.integrations.transformers import exact

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


class Run:
    """Trains one case with a Trainer; `folder` is where it may write."""

    def __init__(self, hosts: Any, problem: Any, folder: Path) -> None:
        self.hosts, self.problem, self.folder = hosts, problem, folder

    def __call__(self, kind: type[Any], mode: str, **options: Any) -> Any:
        case = self.problem.PROBLEMS[options.pop("case", "masked tokens")]
        resume = options.pop("resume", None)
        model = options.pop("model", None) or self.hosts.ReaderForTokenClassification()
        data = options.pop("data", None) or self.problem.Tokens(case)
        callbacks = options.pop("callbacks", ())
        given = {n: options.pop(n) for n in ("compute_loss_func", "data_collator") if n in options}
        args = self.hosts.arguments(case, mode, str(self.folder), **options)
        args = TrainingArguments(**args)
        trainer = kind(
            model=model, args=args, train_dataset=data, callbacks=list(callbacks), **given
        )
        for one in callbacks:
            one.trainer = trainer
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    def distance(self, ours: Any, whole: Any, start: nn.Module | None = None) -> float:
        flat = self.problem.flat
        start = start or self.hosts.ReaderForTokenClassification()
        found: float = self.problem.distance(flat(ours.model), flat(whole.model), flat(start))
        return found


@pytest.fixture
def run(hosts: Any, problem: Any, tmp_path: Path) -> Run:
    return Run(hosts, problem, tmp_path)


def mode_of(trainer: Any) -> str:
    mode: str = trainer._whole._runner.executor.mode
    return mode


def test_torch_compile_means_graphs_of_ours(run: Run, traces: Traces) -> None:
    ours = run(exact(Trainer), "ours", torch_compile=True)
    assert run.distance(ours, run(Trainer, "whole")) <= EXACT
    assert (mode_of(ours), traces.made) == ("operations", 1)
    assert type(ours.model_wrapped).__name__ == "OptimizedModule"  # as its user knows it


def test_bf16_in_the_models_forward(run: Run, hosts: Any, traces: Traces) -> None:
    """Accelerate's autocast is in the graph, as in eager code; weights are cast once a window."""
    eager = run(exact(Trainer, execute="eager"), "ours", model=hosts.llama(), bf16=True)
    ours = run(exact(Trainer, execute="compile"), "ours", model=hosts.llama(), bf16=True)
    full = run(Trainer, "whole", model=hosts.llama())
    assert mode_of(ours) == "operations"
    off = run.distance(eager, full, hosts.llama())
    assert 1e-4 < off < 0.1
    assert run.distance(ours, full, hosts.llama()) <= 1.25 * off


def test_batchnorm_with_the_statistics_of_the_whole_batch(run: Run) -> None:
    class Images:
        def __init__(self) -> None:
            draw = torch.Generator().manual_seed(2)
            self.pixels = torch.randn(29, 3, 16, 16, generator=draw, dtype=torch.float64)
            self.labels = torch.randint(0, 3, (29,), generator=draw)

        def __len__(self) -> int:
            return len(self.labels)

        def __getitem__(self, index: int) -> Any:
            return {"pixel_values": self.pixels[index], "labels": self.labels[index]}

    def resnet() -> Any:
        torch.manual_seed(3)
        sizes = {"embedding_size": 4, "hidden_sizes": [8, 8], "depths": [1, 1], "num_labels": 3}
        return ResNetForImageClassification(ResNetConfig(**sizes, layer_type="basic")).double()

    given: dict[str, Any] = {"case": "equal", "learning_rate": 0.05}
    whole = run(Trainer, "whole", model=resnet(), data=Images(), **given)
    for options in ({}, {"micro_batch": 3}):
        ours = run(exact(Trainer, **options), "ours", model=resnet(), data=Images(), **given)
        assert run.distance(ours, whole, resnet()) <= EXACT
        for (name, a), b in zip(ours.model.named_buffers(), whole.model.buffers(), strict=True):
            assert torch.allclose(a.double(), b.double(), rtol=1e-12, atol=1e-14), name


def losses_of(trainer: Any) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize(("operation", "execute"), [(150, "compile"), (400, "eager")])
def test_out_of_memory_makes_smaller_micro_batches(
    run: Run, traces: Traces, operation: int, execute: Any
) -> None:
    given: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1}
    whole = run(Trainer, "whole", **given)
    kind = exact(Trainer, execute=execute, audit=False)
    run(kind, "ours", **given)  # what a process does once only is not counted
    failure = OutOfMemoryAt(operation)
    with failure:
        ours = run(kind, "ours", **given)
    assert failure.failed_at is not None
    assert ours._whole.recoveries == 1
    assert ours._whole.last_step.micro_batches >= 4
    assert run.distance(ours, whole) <= EXACT
    assert losses_of(ours) == pytest.approx(losses_of(whole), rel=1e-6)


class Events(TrainerCallback):
    """Writes down what the Trainer tells its callbacks."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **given: Any) -> None:
            self.seen.append((name, state.global_step, round(state.epoch or 0, 6), sorted(given)))

        return note


def test_callbacks_logs_and_evaluation_are_the_trainers(
    run: Run, problem: Any, traces: Traces
) -> None:
    case = problem.PROBLEMS["equal"]  # where the Trainer's own accumulation is right
    logs, events = [], []
    for kind in (Trainer, exact(Trainer, execute="compile")):

        class Evaluated(kind):  # type: ignore[misc, valid-type]
            def __init__(self, **given: Any) -> None:
                super().__init__(**given, eval_dataset=problem.Tokens(case))

        seen = Events()
        trainer = run(
            Evaluated,
            "ours",
            case="equal",
            callbacks=[seen],
            logging_strategy="steps",
            logging_steps=1,
            eval_strategy="epoch",
            num_train_epochs=2,
            lr_scheduler_type="linear",
            max_grad_norm=0.05,
        )
        timed = ("runtime", "per_second")
        logs.append(
            [
                {k: v for k, v in log.items() if not k.endswith(timed)}
                for log in trainer.state.log_history
            ]
        )
        events.append(seen.seen)
    assert events[0] == events[1]
    assert len(logs[0]) == len(logs[1]) > 5
    for plain, ours in zip(*logs, strict=True):
        assert plain.keys() == ours.keys()
        for name, value in plain.items():
            assert ours[name] == pytest.approx(value, rel=1e-6), name


def test_a_checkpoint_in_a_window_of_graphs_begins_it_again(
    run: Run, traces: Traces, tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        "seed": 7,
        "save_strategy": "steps",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "num_train_epochs": 2,
    }
    kind = exact(Trainer, execute="compile")
    straight = run(kind, "ours", **given)
    run(kind, "ours", callbacks=[Stop()], **given)
    resumed = run(kind, "ours", resume=str(tmp_path / "checkpoint-1"), **given)
    assert mode_of(resumed) == "operations"
    assert run.distance(resumed, straight) <= EXACT
    assert losses_of(resumed) == pytest.approx(losses_of(straight), rel=1e-12)


def test_a_step_above_ours_is_the_trainers(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    kind: Any = type("Above", (exact(Trainer),), {"training_step": step_above})
    with caplog.at_level(logging.INFO, logger="wholebatch"):
        ours = run(kind, "ours")
    assert run.distance(ours, run(Trainer, "whole")) <= EXACT
    assert ours._whole is None
    assert "training_step is not the Trainer's own" in caplog.text


def step_above(self: Any, *given: Any, **named: Any) -> Any:
    kind = next(one for one in type(self).__mro__ if one.__name__ == "ExactTrainerMixin")
    return kind.training_step(self, *given, **named)


@pytest.mark.distributed
def test_two_ranks(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By graphs, and by eager code."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torchrun(Path(__file__).with_name("trainer_worker.py"), 2, str(tmp_path))
    whole = run(Trainer, "whole", case="two processes", max_grad_norm=0.05)
    flat: Callable[[Any], Tensor] = run.problem.flat
    start = flat(run.hosts.ReaderForTokenClassification())
    for name in ("compile", "eager"):
        trained = torch.load(tmp_path / f"{name}.pt")
        assert run.problem.distance(trained, flat(whole.model), start) <= EXACT, name
