"""TRL's trainers with one batch and with four: the same update through `exact`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
OFF = [
    ("DPO", {"loss_type": ["ipo", "hinge"], "loss_weights": [0.5, 1.0]}),
    ("DPO", {"precompute_ref_log_probs": True}),
    ("Reward", {"center_rewards_coefficient": 0.1}),
    ("KTO", {"precompute_ref_log_probs": True, "desirable_weight": 1.4}),
    ("GRPO", {"loss_type": "bnpo", "beta": 0.1}),
    ("GRPO", {"entropy_coef": 0.5}),
]
RIGHT = [
    ("GRPO", {"loss_type": "grpo"}),
    ("GRPO", {"loss_type": "dr_grpo", "importance_sampling_level": "sequence"}),
    ("GRPO", {"rloo": True}),
]


@pytest.mark.parametrize(("name", "options"), OFF, ids=str)
def test_four_batches_make_the_update_of_one_where_trls_do_not(
    name: str, options: dict[str, Any]
) -> None:
    own, ours = updates(name, **options)
    assert ours <= FLOAT32
    assert own > 0.01


@pytest.mark.parametrize(("name", "options"), RIGHT, ids=str)
def test_four_batches_make_the_update_of_one_as_trls_do(name: str, options: dict[str, Any]) -> None:
    own, ours = updates(name, **options)
    assert ours <= FLOAT32
    assert own <= FLOAT32


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


@pytest.mark.parametrize("name", ["DPO", "KTO"])
def test_evaluation_is_trls_own(name: str) -> None:
    """Before the training and after it, when KTO has an estimate of its last window."""
    both = [TRAINERS[name](kind, 1) for kind in (exact, plain)]
    for train in (False, True):
        for one in both:
            if train:
                trained(one)
        found, right = (one.evaluate(one.train_dataset)["eval_loss"] for one in both)
        assert found == pytest.approx(right, rel=1e-6)


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


# ------------------------------------------------------- our losses have TRL's values


def batch_of(trainer: Any) -> Any:
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def sums(model: Any, ids: Tensor, attention: Tensor, mask: Tensor) -> Tensor:
    labels = ids.masked_fill(mask == 0, -100)
    logits = model(input_ids=ids, attention_mask=attention).logits
    return wb.losses.sequence_logprobs(logits, labels)


def value(loss: Any) -> float:
    return float(loss.total / loss.units)


def test_dpo_values() -> None:
    trainer = runs.dpo(plain, 1, beta=0.3, loss_type="sigmoid")
    inputs = batch_of(trainer)
    given = (inputs["input_ids"], inputs["attention_mask"], inputs["completion_mask"])
    models = (trainer.model, trainer.ref_model)
    of = [half for model in models for half in sums(model, *given).chunk(2)]
    theirs = trainer.compute_loss(trainer.model, inputs).item()
    assert value(wb.losses.dpo_loss(*of, beta=0.3)) == pytest.approx(theirs, rel=1e-5)


MEANS = {
    "dapo": {"mean": "tokens"},
    "bnpo": {"mean": "tokens"},
    "grpo": {"mean": "sequences"},
    "luspo": {"mean": "sequence_sums"},
    "dr_grpo": {"mean": "constant", "constant": 8.0},
}


@pytest.mark.parametrize(
    ("loss_type", "ratio"), [*((kind, "token") for kind in MEANS), ("grpo", "sequence")]
)
def test_policy_values(loss_type: str, ratio: Any) -> None:
    trainer = runs.grpo(
        plain,
        1,
        loss_type=loss_type,
        beta=0.1,
        epsilon=0.1,
        epsilon_high=0.28,
        delta=1.4,
        importance_sampling_level=ratio,
        use_bias_correction_kl=False,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = batch_of(trainer)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    length = inputs["completion_ids"].shape[1]
    logits = trainer.model(input_ids=ids, attention_mask=attention).logits
    logs = logits[:, -length - 1 : -1].log_softmax(-1)
    logprobs = logs.gather(-1, inputs["completion_ids"][..., None])[..., 0]
    torch.manual_seed(3)
    old = logprobs.detach() + 0.3 * torch.randn_like(logprobs)
    reference = logprobs.detach() + 0.2 * torch.randn_like(logprobs)
    inputs |= {"old_per_token_logps": old, "ref_per_token_logps": reference}
    theirs = trainer.compute_loss(trainer.model, copy.copy(inputs)).item()
    loss = wb.losses.policy_loss(
        logprobs,
        inputs["advantages"],
        inputs["completion_mask"],
        old=old,
        clip=(0.1, 0.28),
        max_ratio=1.4,
        ratio=ratio,
        plus=0.1 * wb.losses.token_kl(logprobs, reference),
        **MEANS[loss_type],
    )
    assert value(loss) == pytest.approx(theirs, rel=1e-5)
