"""DeepSpeed's ZeRO 0 to 3 make the update of one process on the undivided global batch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import reports

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
    ),
]

FLOAT32 = 1e-6


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All cases in one launch: starting two processes with DeepSpeed takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        worker = Path(__file__).with_name("deepspeed_worker.py")
        return reports(worker, 2, tmp_path_factory.mktemp("deepspeed"))


@pytest.mark.parametrize("stage", range(4))
def test_the_update_is_that_of_the_undivided_batch(stage: int, ranks: Any) -> None:
    for rank in ranks:
        rows = {case: row for case, row in rank["off"].items() if case.startswith(f"{stage},")}
        assert len(rows) >= 3
        for case, row in rows.items():
            assert max(row["gradients"], row["parameters"]) <= FLOAT32, case
            assert row["update"] <= FLOAT32 + 1.25 * row["floor"], case


@pytest.mark.parametrize("stage", ["2", "3"])
def test_bf16_is_as_near_to_float64_as_the_undivided_batch(stage: str, ranks: Any) -> None:
    for rank in ranks:
        assert 0 < rank["bf16"][stage]["ours"] <= 1.25 * rank["bf16"][stage]["whole"]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("bf16", 'a DeepSpeed engine with bf16 without "data_types": {"grad_accum_dtype": "fp32"}'),
        ("communication", 'a DeepSpeed engine with a "communication_data_type" that is not "fp32"'),
        ("offload", "a DeepSpeed engine with offload to nvme: not tested to make the update"),
        ("overlap", "a DeepSpeed engine with overlap_comm beside ZeRO 1: not tested to make"),
        ("clip", "gradient_clipping=1 in DeepSpeed's configuration beside clip_norm="),
        ("every", "sync='every' with ZeRO 1: it cannot"),
        ("hold", "sync='hold' with ZeRO 3: it cannot"),
        ("optimizer", "optimizer=SGD: a DeepSpeed engine steps its own"),
        ("precision", "precision='bf16' with a DeepSpeed engine: it switches off an autocast"),
        ("host", 'optimizer_state="host" on a model that an engine'),
        ("scaler", "scaler= with a DeepSpeed engine"),
        ("ema", "ema= with ZeRO 3"),
        ("a mean", "a mean"),
        ("hook", "a parameter has a gradient hook: with ZeRO 1 no rank holds the whole"),
        ("state", "state_dict() in an open window (micro-batches so far: 1): save where backward"),
        ("flush", "a DeepSpeed engine reduces gradients inside a backward"),
        ("together", "give each engine its own accumulator and its own loop"),
        ("one loop", "for DeepSpeed engines: one loop each"),
    ],
)
def test_refused(case: str, said: str, ranks: Any) -> None:
    assert all(said in rank["refused"][case] for rank in ranks)
