"""A mixture of experts in `exact(Trainer)`: `loss=wb.moe_loss()`, against undivided batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import wholebatch as wb
from tests.coupled.mixtures import mixture, texts, trained, undivided
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
THREE: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_the_update_is_that_of_the_undivided_batch(kind: str, tmp_path: Path) -> None:
    batch = texts(10)
    reference = undivided(mixture(kind), batch)[1]
    options: dict[str, Any] = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}
    exactly: Any = exact(Trainer, loss=wb.moe_loss())
    ours = trained(exactly, mixture(kind), batch, str(tmp_path), **options)
    assert distance(ours, reference) <= EXACT
    own = trained(Trainer, mixture(kind), batch, str(tmp_path), **options)
    assert distance(own, reference) > 0.01
    cut: Any = exact(Trainer, loss=wb.moe_loss(), micro_batch=4)
    whole = {"per_device_train_batch_size": 10}
    assert distance(trained(cut, mixture(kind), batch, str(tmp_path), **whole), reference) <= EXACT


def test_the_balance_of_each_batch_is_refused(tmp_path: Path) -> None:
    message = r"adds the load balance of each batch .*coef=0.5.* exact\(Trainer, loss=wb.moe_loss"
    with pytest.raises(UnsupportedError, match=message):
        trained(exact(Trainer), mixture("Mixtral"), texts(6), str(tmp_path), **THREE)


def test_without_a_balance_loss_nothing_changes(tmp_path: Path) -> None:
    batch, off = texts(6), {"router_aux_loss_coef": 0.0}
    reference = undivided(mixture("Mixtral", **off), batch)[1]
    ours = trained(exact(Trainer), mixture("Mixtral", **off), batch, str(tmp_path), **THREE)
    assert distance(ours, reference) <= EXACT
