"""`wholebatch train` on several ranks: the update of one, whatever divides; saved and resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.helpers import EXACT, NOISY, assert_same_bits, metrics_of, newest_checkpoint
from tests.distributed.launch import torchrun
from wholebatch.cli import main
from wholebatch.cli.checkpoints import Checkpoints, put_together

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

RANKS = 3
WORKER = Path(__file__).parent / "train_worker.py"
NORMED = EXACT.replace("nn.Tanh()", "nn.BatchNorm1d(8)").replace('size": 10', 'size": 11')
BROKEN = EXACT.replace(
    "    x, y = micro",
    '    import os\n    x, y = micro\n    if os.environ["RANK"] == "1":\n'
    '        raise ValueError("sample 17 is broken")',
)

Reports = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one job has run every case of the worker, and one process what they are held to."""
    folder = tmp_path_factory.mktemp("train")
    recipes = {"exact": EXACT, "noisy": NOISY, "normed": NORMED, "broken": BROKEN}
    for name, text in recipes.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    path = str(folder / "exact.py")
    for out, options in {
        "one": [],
        "one-tiny": ["--batch-size", "2", "--micro-batch", "1"],
        "from-one": ["--steps", "2"],
    }.items():
        assert main(["train", path, "--out", str(folder / out), *options]) == 0
    torchrun(WORKER, RANKS, str(folder), check=False)  # its last case fails, as it should
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Reports:
    return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(RANKS)]


def model_of(run: Path) -> dict[str, torch.Tensor]:
    found = Checkpoints(run / "checkpoints").load()
    parts = {"model": found.state["model"]}
    model: dict[str, torch.Tensor] = put_together(parts, found.path, like=lambda _: None)["model"]
    return model


def error_of(run: Path, right: Path) -> float:
    """The distance of the whole way that the parameters went, relative to its length."""
    start = Checkpoints(right / "checkpoints").read(right / "checkpoints/window-00000000.pt")
    begun, one, other = start.state["model"], model_of(run), model_of(right)
    apart = torch.cat([(one[name] - other[name]).flatten() for name in begun])
    way = torch.cat([(other[name] - begun[name]).flatten() for name in begun])
    return float(apart.norm() / way.norm())


@pytest.mark.parametrize("run", ["ddp", "fsdp2"])
def test_the_update_is_that_of_one_process(folder: Path, ranks: Reports, run: str) -> None:
    """Ten samples on three ranks, and a last batch of four."""
    assert [rank[run]["status"] for rank in ranks] == [0, 0, 0], ranks
    assert error_of(folder / run, folder / "one") <= 1e-12
    right, found = metrics_of(folder / "one"), metrics_of(folder / run)
    assert [line["units"] for line in found] == [10, 10, 4, 10]
    for ours, theirs in zip(found, right, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-12)


@pytest.mark.parametrize("run", ["tiny", "tiny-fsdp2"])
def test_a_rank_without_a_sample_takes_part(folder: Path, ranks: Reports, run: str) -> None:
    assert [rank[run]["status"] for rank in ranks] == [0, 0, 0], ranks
    assert error_of(folder / run, folder / "one-tiny") <= 1e-12


def test_the_first_rank_prints_the_arithmetic_and_the_others_are_quiet(ranks: Reports) -> None:
    said = ranks[0]["ddp"]["out"]
    assert "4 × 1 × 1 rank + 3 × 1 × 2 ranks = 10 samples an update" in said
    assert "24 samples, 3 batches an epoch" in said
    assert "--nproc-per-node 3 -m wholebatch.cli train --resume --out ddp --steps 8" in said
    assert ranks[0]["fsdp2"]["out"].rstrip().endswith("--steps 8 --parallel fsdp2")
    for rank in ranks[1:]:
        assert {rank[case]["out"] for case in rank} == {""}


@pytest.mark.parametrize("run", ["from-one", "from-one-fsdp2"])
def test_a_run_of_one_process_goes_on_over_ranks(folder: Path, ranks: Reports, run: str) -> None:
    assert ranks[0][f"on/{run}"]["status"] == 0, ranks[0][f"on/{run}"]
    assert "after update 2, which 1 rank made" in ranks[0][f"on/{run}"]["out"]
    assert error_of(folder / run, folder / "one") <= 1e-12


@pytest.mark.parametrize("run", ["half", "half-fsdp2"])
def test_a_run_of_ranks_goes_on_in_one_process(
    folder: Path, tmp_path: Path, run: str, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / run, tmp_path / run)
    assert main(["train", "--resume", "--out", str(tmp_path / run), "--steps", "4"]) == 0
    assert "after update 2, which 3 ranks made" in capfd.readouterr().out
    assert error_of(tmp_path / run, folder / "one") <= 1e-12
    assert [line["window"] for line in metrics_of(tmp_path / run)] == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["", "-fsdp2"])
def test_all_ranks_stop_at_the_same_window_and_go_on_bit_for_bit(
    folder: Path, ranks: Reports, kind: str
) -> None:
    """Dropout and samples that are drawn: every rank's generators are in the checkpoint."""
    stopped = [rank[f"stop/stopped{kind}"] for rank in ranks]
    assert [rank["status"] for rank in stopped] == [130] * RANKS, stopped
    assert "stopped after update 2 of 6; checkpoint" in stopped[0]["out"]
    again = [rank[f"again/stopped{kind}"] for rank in ranks]
    assert [rank["status"] for rank in again] == [0] * RANKS, again
    assert "after update 2" in again[0]["out"]
    assert metrics_of(folder / f"stopped{kind}") == metrics_of(folder / f"straight{kind}")
    one, other = folder / f"straight{kind}", folder / f"stopped{kind}"
    assert_same_bits(model_of(one), model_of(other))
    first, second = newest_checkpoint(one), newest_checkpoint(other)
    for part in ("ranks", "data"):
        assert_same_bits(first[part], second[part], part)
    generators = [rank["random"]["torch"] for rank in first["ranks"]]
    assert not torch.equal(generators[0], generators[1])


def test_what_is_refused_is_told_once(ranks: Reports) -> None:
    assert [rank["refused"]["status"] for rank in ranks] == [2] * RANKS
    assert ranks[0]["refused"]["err"] == (
        "error: --batch-size 99: is more than the 24 samples that the recipe's data() has\n"
    )
    assert ranks[1]["refused"]["err"] == ranks[2]["refused"]["err"] == ""
    assert [rank["normed"]["status"] for rank in ranks] == [2] * RANKS
    assert (
        "has 2 samples for 3 ranks, and exact BatchNorm needs one on every rank"
        in (ranks[0]["normed"]["err"])
    )


def test_a_rank_that_fails_ends_all_with_its_message(ranks: Reports) -> None:
    assert [rank["broken"]["status"] for rank in ranks] == [1] * RANKS
    assert "error: rank 1: ValueError: sample 17 is broken" in ranks[1]["broken"]["err"]
    assert "broken.py:" in ranks[1]["broken"]["err"]
    for rank in (ranks[0], ranks[2]):
        assert rank["broken"]["err"].startswith("error: ")
        assert rank["broken"]["err"].count("\n") == 1


def test_engines_that_the_command_does_not_know(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--parallel", "zero"]) == 2
    said = capfd.readouterr().err
    assert said == "error: --parallel zero: must be one of ddp, fsdp2, deepspeed, pipeline\n"
    assert main(["train", "--parallel", "deepspeed", "--zero", "4"]) == 2
    assert "--zero 4: must be a stage of ZeRO, 0 to 3" in capfd.readouterr().err
    assert main(["train", "--parallel", "pipeline", "--schedule", "zigzag"]) == 2
    assert "--schedule zigzag: must be one of 1f1b, gpipe" in capfd.readouterr().err


def test_a_damaged_slice_is_noticed(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "half-fsdp2", tmp_path / "hurt")
    [newest] = (tmp_path / "hurt/checkpoints").glob("window-00000002.sharded")
    slice_of_one = next(newest.glob("__1_*"))
    slice_of_one.write_bytes(slice_of_one.read_bytes()[:-1])
    found = Checkpoints(tmp_path / "hurt/checkpoints").load()
    assert found.path.name == "window-00000000.sharded"
    [(path, reason)] = found.damaged
    assert path == newest
    assert "bytes instead of" in reason
