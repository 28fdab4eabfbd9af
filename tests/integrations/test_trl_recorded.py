"""TRL's trainers as one graph: the update, the log, adapters, and what cannot be a graph."""

from __future__ import annotations

import logging
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import EXACT

pytest.importorskip("trl")

from tests.integrations import trl_training as runs
from tests.integrations.conftest import Traces
from tests.integrations.trl_training import off, trained
from wholebatch.integrations.transformers import exact, exact_sft
from wholebatch.losses import sliced_cross_entropy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
TRAINERS = {"SFT": runs.completions, **runs.TRAINERS}
MASKED = {"completion_only_loss": True, "max_length": 9}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CI", "1")  # TRL sends nothing
    datasets.disable_progress_bars()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="wholebatch")
    return caplog


def plain(kind: Any) -> Any:
    return kind


def eager(kind: Any) -> Any:
    return exact(kind, execute="eager")


def compiled(kind: Any) -> Any:
    return exact(kind, execute="compile")


def case(make: Any, batches: int, **options: Any) -> Any:
    """Return an SFTTrainer in float64."""
    if options.pop("adapters", False):
        torch.manual_seed(2)
        options["peft_config"] = pytest.importorskip("peft").LoraConfig(**LORA)
    trainer = runs.completions(make, batches, model=runs.in_float64(runs.llama()), **options)
    trainer.model.double()  # PEFT makes adapters in float32
    return trainer


# Of 14 samples, the last batch is smaller: a graph more, which takes as long as the first.
@pytest.mark.parametrize(
    ("options", "samples"),
    [({}, 14), ({"adapters": True, "gradient_checkpointing": True}, 16)],
    ids=str,
)
def test_a_graph_makes_the_update_of_the_undivided_batch(
    options: dict[str, Any],
    samples: int,
    traces: Traces,
    said: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs, "SAMPLES", samples)
    options = {**MASKED, "learning_rate": 0.1, "pad_to_multiple_of": 32, **options}
    options |= {"num_train_epochs": 3}
    whole = trained(case(eager, 1, **options), updates=3)
    assert not traces.made
    assert off(trained(case(compiled, 4, **options), updates=3), whole) <= EXACT
    assert "micro-steps are now one" in said.text


@pytest.mark.parametrize(
    ("make", "options"),
    [(eager, {}), (compiled, {"loss_type": "dft"})],
    ids=["eager", "dft"],
)
def test_large_logits_are_made_in_slices(
    make: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "SAMPLES", 16)
    options = {**MASKED, "learning_rate": 0.1, "pad_to_multiple_of": 32, **options}
    options |= {"num_train_epochs": 3}
    whole = trained(case(eager, 1, **options), updates=3)
    largest: list[int] = []

    sums_of_rows = exact_sft._sums_of_rows

    def watched(logits: torch.Tensor, *rest: Any, **options: Any) -> Any:
        largest.append(len(logits))
        return sums_of_rows(logits, *rest, **options)

    monkeypatch.setattr(exact_sft, "_sums_of_rows", watched)
    monkeypatch.setattr(sliced_cross_entropy, "rows_at_once", lambda _: 24)
    assert off(trained(case(make, 4, **options), updates=3), whole) <= EXACT
    assert 24 in largest


def test_a_batch_without_a_label() -> None:
    """A prompt longer than max_length leaves a row without any label."""
    options: dict[str, Any] = {**MASKED, "num_train_epochs": 1, "learning_rate": 0.1}
    whole, ours = (case(make, 1, **options) for make in (eager, eager))
    rows = [dict(row) for row in ours.train_dataset]
    for row in rows[2:5]:  # the second micro-batch of two rows, and one row of the third
        row["labels"] = [-100] * len(row["input_ids"])
    for trainer in (whole, ours):
        trainer.train_dataset = rows
        trainer.args.per_device_train_batch_size = len(rows)
    ours.args.per_device_train_batch_size = 2
    ours.args.gradient_accumulation_steps = -(-len(rows) // 2)
    assert off(trained(ours), trained(whole)) <= EXACT


@pytest.mark.parametrize("strategy", ["wrapped", "bfd"])
def test_packed_rows(strategy: str, traces: Traces, said: pytest.LogCaptureFixture) -> None:
    """Texts in one row do not see each other, and their tokens count as before."""
    options: dict[str, Any] = {"packing": True, "packing_strategy": strategy, "max_length": 16}
    options |= {"learning_rate": 0.1, "num_train_epochs": 3, "completion_only_loss": True}
    rows = len(case(eager, 1, **options).train_dataset)
    whole = {**options, "per_device_train_batch_size": rows}
    parts = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": -(-rows // 2)}
    make = eager if strategy == "wrapped" else compiled
    ours = trained(case(make, 1, **options, **parts), updates=3)
    assert off(ours, trained(case(eager, 1, **whole), updates=3)) <= EXACT
    assert ("micro-steps are now one" in said.text) == (make is compiled)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SFT", {"completion_only_loss": True, "max_length": 9, "in_slices": True}),
        ("SFT", {"completion_only_loss": True, "max_length": 9, "loss_type": "dft"}),
        ("DPO", {"loss_type": ["sigmoid", "hinge"], "loss_weights": [1.0, 0.5]}),
        ("KTO", {"gradient_accumulation_steps": 1}),  # TRL's estimate is that of a micro-batch
    ],
    ids=str,
)
def test_the_log_is_trls_own(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**options}
    if options.pop("in_slices", False):
        monkeypatch.setattr(sliced_cross_entropy, "rows_at_once", lambda _: 3)
    monkeypatch.setattr(runs, "SAMPLES", 16)  # TRL's own update is right with equal batches
    often = {"logging_strategy": "steps", "logging_steps": 2, "num_train_epochs": 3}
    often |= {"learning_rate": 0.1, **options}
    own, ours = (logs(TRAINERS[name](make, 4, **often)) for make in (plain, eager))
    assert [row.keys() for row in ours] == [row.keys() for row in own]
    assert len(ours[0]) >= 7
    for row, expected in zip(ours, own, strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-6)


TIMES = {"epoch", "train_runtime", "train_samples_per_second", "train_steps_per_second"}


def logs(trainer: Any) -> list[dict[str, float]]:
    trainer.train()
    return [
        {name: value for name, value in row.items() if name not in TIMES}
        for row in trainer.state.log_history
    ]


def test_the_script_to_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    script = Path(__file__).parents[2] / "examples" / "integrations" / "trl_sft.py"
    trainer = runpy.run_path(str(script))["trainer"]
    first, *_, last = (row for row in trainer.state.log_history if "loss" in row)
    assert last["loss"] < first["loss"]
    assert last["num_tokens"] > first["num_tokens"] > 0  # counted by the recorded loss
