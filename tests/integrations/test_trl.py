"""TRL's trainers with one batch and with four: the same update through `exact`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import wholebatch as wb
from tests.distributed.launch import reports

pytest.importorskip("trl")

from tests.integrations import trl_training as runs
from tests.integrations.trl_training import TRAINERS, off, trained
from wholebatch.integrations.transformers import exact

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
# Parts of TRL's losses and of Llama compute in float32, in a float64 model too. The seed of a
# window is a power of two near 1 / units, not 1 / units as that of a mean: they round otherwise.
FLOAT32 = 1e-6


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import datasets

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CI", "1")  # TRL sends nothing
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def plain(kind: Any) -> Any:
    return kind


def updates(name: str, **options: Any) -> tuple[float, float]:
    """How far TRL's four batches and ours are from TRL's one."""
    make = TRAINERS[name]
    whole = trained(make(plain, 1, **options))
    own = trained(make(plain, 4, **options))
    ours = trained(make(exact, 4, **options))
    return off(own, whole), off(ours, whole)


# TRL's own update is that of the whole batch already where its loss is divided by the window's
# tokens (dapo and its like), or by sequences that are as many in each
# batch (the others of GRPO). It is not for the rest.
UPDATES = [
    ("DPO", {"loss_type": ["ipo", "hinge"], "loss_weights": [0.5, 1.0]}),
    ("DPO", {"precompute_ref_log_probs": True}),
    ("Reward", {"center_rewards_coefficient": 0.1}),
    ("KTO", {"precompute_ref_log_probs": True, "desirable_weight": 1.4}),
    ("GRPO", {"loss_type": "bnpo", "beta": 0.1}),
    ("GRPO", {"entropy_coef": 0.5}),
    ("GRPO", {"loss_type": "dr_grpo", "importance_sampling_level": "sequence"}),
    ("GRPO", {"rloo": True}),
]


@pytest.mark.parametrize(("name", "options"), UPDATES, ids=str)
def test_four_batches_make_the_update_of_one(name: str, options: dict[str, Any]) -> None:
    own, ours = updates(name, **options)
    assert ours <= FLOAT32
    trls_are_right = options.keys() & {"importance_sampling_level", "rloo"}
    assert own <= FLOAT32 if trls_are_right else own > 0.01


def test_gkd_is_refused_by_name() -> None:
    from trl.experimental.gkd import GKDTrainer

    class Own(GKDTrainer):  # type: ignore[misc]
        pass

    for kind in (GKDTrainer, Own):
        message = r"exact\(GKDTrainer\): it draws the answers .* wb\.Accumulator"
        with pytest.raises(wb.errors.UnsupportedError, match=message):
            exact(kind)


@pytest.mark.parametrize(("name", "size"), [("DPO", 3), ("Reward", wb.tokens(40)), ("KTO", 3)])
def test_batches_can_be_cut_further(name: str, size: Any) -> None:
    """Pairs stay together, and a micro-batch of KTO knows the window's estimate."""
    whole = trained(TRAINERS[name](plain, 1))
    ours = trained(TRAINERS[name](lambda kind: exact(kind, micro_batch=size), 2))
    assert off(ours, whole) <= FLOAT32


def test_batches_of_grpo_are_not_cut() -> None:
    with pytest.raises(wb.errors.OptionError, match=r"micro_batch=3 .*GRPOTrainer\.training_step"):
        trained(runs.grpo(lambda kind: exact(kind, micro_batch=3), 2))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("DPO", {"loss_type": "aot"}, r"loss_type='aot', which sorts the pairs"),
        ("DPO", {"loss_type": ["sigmoid", "sft"]}, r"'sft', which is a mean over tokens"),
        ("GRPO", {"top_entropy_quantile": 0.5}, r"exact\(GRPOTrainer\): top_entropy_quantile"),
        ("GRPO", {"loss_type": "grpo", "entropy_coef": 0.1}, "one over sequences"),
    ],
)
def test_what_is_not_exact_is_refused_by_name(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(wb.errors.UnsupportedError, match=message):
        TRAINERS[name](exact, 4, **options)


def test_two_ranks_make_the_update_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks with two batches each; GRPO draws by rank, so it is held against one batch each."""
    found = reports(Path(__file__).with_name("trl_worker.py"), 2, tmp_path)
    assert found["GRPO own"] > 0.01
    assert found["GRPO"] <= FLOAT32
    monkeypatch.setattr(runs, "SAMPLES", 16)
    for name in ("DPO", "Reward", "KTO"):
        ours = torch.load(tmp_path / f"{name}.pt")
        assert off(ours, trained(TRAINERS[name](plain, 1))) <= FLOAT32, name
