"""Every engine makes the update of the undivided batch, however it is cut."""

from __future__ import annotations

import pytest

from tests.split_invariance import engines
from tests.split_invariance.shared_jobs import SharedJobs

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_torchs_own(ranks: int) -> None:
    """DDP, FSDP2 in three ways, HSDP, tensor parallelism (with FSDP2 on 4 ranks), pipelines."""
    trains = engines.on(ranks)
    jobs = SharedJobs(trains, (engines.SAMPLES, 2, 1), (1, ranks))
    for name in trains:
        report = jobs.report(name, (1, ranks), tolerance=1e-12)
        assert report.same, f"{name}: {report}"


def test_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    trains = {f"ZeRO {n}": engines.partial(engines.by_deepspeed, stage=n) for n in range(4)}
    jobs = SharedJobs(trains, (engines.SAMPLES, 2), (1, 2))
    for name in trains:
        report = jobs.report(name, (1, 2), tolerance=1e-5)
        assert report.same, f"{name}: {report}"


def test_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    for name in ("TRL_EXPERIMENTAL_SILENCE", "HF_HUB_OFFLINE", "CI"):  # TRL sends nothing
        monkeypatch.setenv(name, "1")
    kinds = ("Trainer", "SFTTrainer")
    trains = {kind: engines.partial(engines.by_trainer, kind=kind) for kind in kinds}
    jobs = SharedJobs(trains, (14, 3), (1, 2))  # 14 is not a multiple of 3 on 2 ranks
    for name in trains:
        report = jobs.report(name, (1, 2))
        assert report.same, f"{name}: {report}"
