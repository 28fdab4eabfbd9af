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
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases in one launch: starting two processes with DeepSpeed takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        worker = Path(__file__).with_name("deepspeed_worker.py")
        return reports(worker, 2, tmp_path_factory.mktemp("deepspeed"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_case_of_zero(report: dict[str, Any], stage: int) -> None:
    found = {case: row for case, row in report["errors"].items() if f"zero {stage} " in case}
    assert len(found) >= 5
    # The parameters are float32: what rounding them costs one process is added to the allowance.
    wrong = {
        case: row
        for case, row in found.items()
        if row["gradients"] > FLOAT32
        or row["parameters"] > FLOAT32
        or row["update"] > FLOAT32 + 1.25 * row["floor"]
    }
    assert not wrong


@pytest.mark.parametrize("stage", ["2", "3", "2 offloaded", "3 offloaded"])
def test_bf16_is_as_near_to_float64_as_the_undivided_batch(
    report: dict[str, Any], stage: str
) -> None:
    found = report["bf16"][stage]
    assert 0 < found["gradients"] <= 1.25 * found["whole"], found
    assert found["update"] <= 1.25 * found["whole"], found


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (
            "state",
            ['optimizer_state="host" on a model that an engine', "ZeRO 2 or 3 with offload_optim"],
        ),
        ("precision", ["precision='bf16' with a DeepSpeed engine", 'use precision="full"']),
        ("scaler", ["scaler= with a DeepSpeed engine", "leave it out"]),
        ("ema", ["ema= with ZeRO 3", "use ZeRO 2"]),
        ("every", ["sync='every' with ZeRO 1", "leave it out, or use ZeRO 2"]),
        ("hold", ["sync='hold' with ZeRO 3", "leave it out, or use ZeRO 1"]),
        ("batchnorm", ['batchnorm="exact"', 'use DDP, batchnorm="freeze" or GroupNorm']),
    ],
)
def test_what_a_refusal_advises_is_accepted(
    report: dict[str, Any], case: str, said: list[str]
) -> None:
    refusal, *instead = report["advice"][case]
    assert all(part in refusal for part in said), refusal
    assert instead
    assert set(instead) == {"accepted"}


def test_what_is_advised_to_several_engines_and_other_orders(report: dict[str, Any]) -> None:
    together, over, *updates = report["advice"]["engines"]
    assert "give each engine its own accumulator and its own loop" in together
    assert "for DeepSpeed engines: one loop each" in over
    assert updates == ["1", "1"]
    assert report["advice"]["order"] <= FLOAT32


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("bf16", 'a DeepSpeed engine with bf16 without "data_types": {"grad_accum_dtype": "fp32"}'),
        ("communication", 'a DeepSpeed engine with a "communication_data_type" that is not "fp32"'),
        ("offload", "a DeepSpeed engine with offload to nvme: not tested to make the update"),
        ("late", "the last backward of this window did not reach all parameters"),
        ("clip", "gradient_clipping=1 in DeepSpeed's configuration beside clip_norm="),
        ("every", "sync='every' with ZeRO 1: it reduces once per window"),
        ("hold", "sync='hold' with ZeRO 3: it partitions the gradients"),
        ("optimizer", "optimizer=SGD: a DeepSpeed engine steps its own"),
        ("precision", "precision='bf16' with a DeepSpeed engine: it switches off an autocast"),
        (
            "overlap",
            "a DeepSpeed engine with overlap_comm beside ZeRO 1: not tested to make the update",
        ),
        ("order", "the backwards of this window reached different parameters"),
        ("untouched", "True"),
        ("hook", "a parameter has a gradient hook: with ZeRO 1 no rank holds the whole"),
        (
            "state",
            "state_dict() in an open window (micro-batches so far: 1): save where backward()",
        ),
        ("flush", "a DeepSpeed engine reduces gradients inside a backward"),
    ],
)
def test_refused(report: dict[str, Any], case: str, said: str) -> None:
    assert report["refused"][case].startswith(said)


@pytest.mark.parametrize("stage", ["0", "3"])
def test_losses_that_do_not_add_up_are_refused(report: dict[str, Any], stage: str) -> None:
    found = report["advice"]["tested"][stage]
    assert len(found) == 2
    for case, said in found.items():
        part = "compare" if "contrast" in case else "a mean"
        assert part in said, (case, said)
