"""`exact(Trainer)` with the balance loss of a mixture of experts, against undivided batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.coupled.mixtures import SIZES, mixture, texts, trained, undivided
from tests.support import EXACT, distance
from wholebatch.errors import UnsupportedError

pytest.importorskip("transformers")

from transformers import Trainer

from wholebatch.integrations.transformers import exact

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_update_is_that_of_the_undivided_batch(
    kind: str, checkpointing: bool, tmp_path: Path
) -> None:
    batch = texts(10)
    reference = undivided(mixture(kind), batch)[1]
    options: dict[str, Any] = {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }
    ours = trained(exact(Trainer), mixture(kind), batch, str(tmp_path), **options)
    assert distance(ours, reference) <= EXACT
    own = trained(Trainer, mixture(kind), batch, str(tmp_path), **options)
    assert distance(own, reference) > 0.01
    whole = {"per_device_train_batch_size": 10}
    once = trained(Trainer, mixture(kind), batch, str(tmp_path), **whole)
    assert distance(once, reference) <= EXACT
    cut = trained(exact(Trainer, micro_batch=4), mixture(kind), batch, str(tmp_path), **whole)
    assert distance(cut, reference) <= EXACT


def test_without_a_balance_loss_nothing_changes(tmp_path: Path) -> None:
    batch, off = texts(6), {"router_aux_loss_coef": 0.0}
    reference = undivided(mixture("Mixtral", **off), batch)[1]
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    ours = trained(exact(Trainer), mixture("Mixtral", **off), batch, str(tmp_path), **options)
    assert distance(ours, reference) <= EXACT


def test_a_loss_that_weighs_the_balance_in_its_own_way_is_refused(tmp_path: Path) -> None:
    class Doubled(Trainer):
        def compute_loss(self, *args: Any, **options: Any) -> Tensor:
            loss: Tensor = 2 * super().compute_loss(*args, **options)
            return loss

    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    kind = exact(Doubled, units=lambda inputs: (inputs["labels"][:, 1:] != -100).sum())
    with pytest.raises(UnsupportedError, match=r"with a weight of 1 in the loss; .*coef=0.5"):
        trained(kind, mixture("Mixtral"), texts(6), str(tmp_path), **options)


@pytest.mark.filterwarnings("ignore:None of the inputs:UserWarning")
def test_reentrant_checkpointing_cuts_the_balance_loss_off(tmp_path: Path) -> None:
    options = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    }
    with pytest.raises(UnsupportedError, match="the balance loss has no gradient"):
        trained(exact(Trainer), mixture("Mixtral"), texts(6), str(tmp_path), **options)


def test_a_step_of_the_trainers_own_is_refused(tmp_path: Path) -> None:
    class Own(Trainer):
        def training_step(self, *args: Any, **options: Any) -> Tensor:
            return super().training_step(*args, **options)

    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    with pytest.raises(UnsupportedError, match=r"balance of each batch in it, .*Own.training_step"):
        trained(exact(Own), mixture("Mixtral"), texts(6), str(tmp_path), **options)


def test_trls_sft_trainer(problem: Any, hosts: Any, tmp_path: Path) -> None:
    """TRL adds the balance itself, with a coefficient of its own."""
    pytest.importorskip("trl")
    import compare.trl
    import transformers

    case, ends = problem.PROBLEMS["masked tokens"], {}
    sizes = {**SIZES, "vocab_size": 32, "router_aux_loss_coef": 0.001}
    counted = set()
    for mode in ("whole", "ours", "own"):
        torch.manual_seed(0)
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))
        start = problem.flat(model)
        trainer = compare.trl.trainer_of(model, case, mode, str(tmp_path))
        trainer.train()
        assert trainer.aux_loss_enabled
        ends[mode] = problem.flat(model)
        counted.add(trainer._total_train_tokens)
    assert problem.distance(ends["ours"], ends["whole"], start) <= 1e-6
    assert problem.distance(ends["own"], ends["whole"], start) > 2e-5
    assert len(counted) == 1  # a first pass is not counted
