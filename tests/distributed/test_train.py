"""`wholebatch train` on several ranks: the update of one process; saved and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.helpers import (
    EXACT,
    NOISY,
    assert_same_bits,
    metrics_of,
    newest_checkpoint,
)
from tests.distributed.launch import torchrun
from wholebatch.cli import main

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

RANKS = 3
WORKER = Path(__file__).parent / "train_worker.py"
HELD_OUT = EXACT + "\ndef validation():\n    return data()\n"

Reports = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one job has run every case of the worker, and one process what they are held to."""
    folder = tmp_path_factory.mktemp("train")
    texts = {"exact": EXACT, "noisy": NOISY, "held_out": HELD_OUT}
    texts["stream"] = NOISY.replace(
        "    return Points()", "    return torch.utils.data.DataLoader(Points(), batch_size=10)"
    )
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    path = str(folder / "exact.py")
    assert main(["train", path, "--out", str(folder / "one"), "--updates", "6"]) == 0
    assert main(["train", path, "--out", str(folder / "from-one"), "--updates", "2"]) == 0
    torchrun(WORKER, RANKS, str(folder))
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Reports:
    return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(RANKS)]


def distance(run: Path, right: Path, start: Path) -> float:
    """The distance of the whole way that the parameters went, relative to its length."""
    begun, one, other = (newest_checkpoint(path)["model"] for path in (start, run, right))
    apart = torch.cat([(one[name] - other[name]).flatten() for name in begun])
    way = torch.cat([(other[name] - begun[name]).flatten() for name in begun])
    return float(apart.norm() / way.norm())


def test_the_update_is_that_of_one_process(folder: Path, ranks: Reports) -> None:
    """A run of one process goes on over three ranks: ten samples each, and a last batch of four."""
    case, run = "on/from-one-ddp", folder / "from-one-ddp"
    assert [rank[case]["status"] for rank in ranks] == [0, 0, 0], ranks[0][case]
    assert distance(run, folder / "one", folder / "from-one") <= 1e-12
    right, lines = metrics_of(folder / "one"), metrics_of(run)
    assert [line["units"] for line in lines] == [10, 10, 4, 10, 10, 4]
    for ours, theirs in zip(lines, right, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-12)


def test_a_rank_without_a_sample_takes_part(folder: Path, ranks: Reports) -> None:
    assert [rank["tiny"]["status"] for rank in ranks] == [0, 0, 0], ranks[0]["tiny"]
    assert [line["units"] for line in metrics_of(folder / "tiny")] == [2, 2, 2, 2]


def test_held_out_samples_on_ranks(folder: Path, ranks: Reports) -> None:
    """24 samples in batches of 10 over three ranks: uneven numbers of micro-batches."""
    assert [rank["held-out"]["status"] for rank in ranks] == [0, 0, 0], ranks[0]["held-out"]
    [line] = metrics_of(folder / "held-out")
    assert line["validation_loss"] > 0


@pytest.mark.parametrize("kind", ["", "-stream"], ids=["dataset", "stream"])
def test_all_ranks_stop_at_the_same_window_and_go_on_bit_for_bit(
    folder: Path, ranks: Reports, kind: str
) -> None:
    assert [rank[f"stop/stopped{kind}"]["status"] for rank in ranks] == [130, 130, 130]
    said = ranks[0][f"stop/stopped{kind}"]["out"]
    assert "stopped after update " in said
    assert "Continue with: torchrun --nproc-per-node 3 -m wholebatch train --resume" in said
    assert [rank[f"again/stopped{kind}"]["status"] for rank in ranks] == [0, 0, 0], ranks[0]
    straight, stopped = folder / f"straight{kind}", folder / f"stopped{kind}"
    one, other = newest_checkpoint(straight), newest_checkpoint(stopped)
    for part in ("model", "optimizer", "data", "ranks"):
        assert_same_bits(one[part], other[part], part)
    assert metrics_of(straight) == metrics_of(stopped)


def test_what_is_refused_is_told_once(ranks: Reports) -> None:
    assert [rank["refused"]["status"] for rank in ranks] == [2, 2, 2]
    told = [rank["refused"]["err"] for rank in ranks]
    assert told[0].startswith("error: --batch-size 99: is more than the 24 samples")
    assert told[1:] == ["", ""]
