"""`wholebatch train --parallel deepspeed|pipeline`: the update of one process; saved, resumed."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.helpers import EXACT, metrics_of
from tests.distributed.launch import torchrun
from tests.distributed.test_train import error_of
from wholebatch.cli import main

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

WORKER = Path(__file__).parent / "engines_worker.py"
LAYERS = EXACT.replace(
    "nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)",
    "nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 6), nn.Linear(6, 3)",
).replace('"steps": 4', '"steps": 4, "clip_norm": 0.5')
LAYERS += """
def scheduler(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
"""
SINGLE = LAYERS.replace(".double()", "").replace(", dtype=torch.float64", "")
UNCUT = LAYERS.replace(
    "def model():\n    return ",
    "class Whole(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.inside = layers()\n    def forward(self, x):\n        return self.inside(x)\n\n"
    "def model():\n    return Whole()\n\ndef layers():\n    return ",
)
TIED = (
    UNCUT
    + """
def stages(model):
    return [*model.inside, model.inside[0]]
"""
)

Reports = list[dict[str, dict[str, Any]]]


def ran(folder: Path, what: str) -> Reports:
    torchrun(WORKER, 2, str(folder), what)
    return [json.loads((folder / f"{what}-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    recipes = {"layers": LAYERS, "single": SINGLE, "uncut": UNCUT, "tied": TIED}
    for name, text in recipes.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    for out, name, options in (
        ("one", "layers", []),
        ("one-single", "single", []),
        ("from-one", "layers", ["--steps", "2"]),
    ):
        path = str(folder / f"{name}.py")
        assert main(["train", path, "--out", str(folder / out), *options]) == 0
    return folder


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Reports:
    return ran(folder, "pipeline")


@pytest.mark.parametrize("run", ["1f1b", "gpipe", "interleaved"])
def test_a_pipeline_makes_the_update_of_one_process(
    folder: Path, pipeline: Reports, run: str
) -> None:
    """Ten samples in micro-batches of four, and a last batch of four; clipped over all stages."""
    assert [rank[run]["status"] for rank in pipeline] == [0, 0], pipeline
    assert error_of(folder / run, folder / "one") <= 1e-12
    right, found = metrics_of(folder / "one"), metrics_of(folder / run)
    for ours, theirs in zip(found, right, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-12)
        assert ours["lr"] == theirs["lr"]
    said = pipeline[0][run]["out"]
    assert f"a pipeline of {4 if run == 'interleaved' else 2} stages ({run})" in said
    assert "(4 × 2 + 2) × 1 rank = 10 samples an update" in said


@pytest.mark.parametrize("run", ["half", "from-one"])
def test_a_pipeline_goes_on(folder: Path, pipeline: Reports, run: str) -> None:
    """From its own checkpoint, and from one that one process wrote."""
    assert [rank[f"on/{run}"]["status"] for rank in pipeline] == [0, 0], pipeline
    assert error_of(folder / run, folder / "one") <= 1e-12
    assert [line["window"] for line in metrics_of(folder / run)] == [1, 2, 3, 4]


def test_one_process_goes_on_where_a_pipeline_was(
    folder: Path, pipeline: Reports, tmp_path: Path
) -> None:
    """A checkpoint of a pipeline is that of one process."""
    assert pipeline[0]["gpipe"]["status"] == 0
    shutil.copytree(folder / "gpipe", tmp_path / "on")
    shutil.copytree(folder / "one", tmp_path / "right")
    for name in ("on", "right"):
        assert main(["train", "--resume", "--out", str(tmp_path / name), "--steps", "6"]) == 0
    assert metrics_of(tmp_path / "on")[-1]["loss"] == pytest.approx(
        metrics_of(tmp_path / "right")[-1]["loss"], rel=1e-12
    )


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("uncut", "how Whole is cut into stages is not known; add stages(model)"),
        ("tied", "is in stage 1 and in stage 2; untie it, or use ddp"),
        ("tokens", "--micro-batch auto with --parallel pipeline: its schedules need a number"),
    ],
)
def test_what_cannot_be_cut_is_refused(pipeline: Reports, case: str, said: str) -> None:
    assert [rank[case]["status"] for rank in pipeline] == [2, 2]
    assert said in pipeline[0][case]["err"]
    assert pipeline[1][case]["err"] == ""


# --- DeepSpeed --------------------------------------------------------------------------------

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed is not installed: pip install 'wholebatch[deepspeed]'",
)


@pytest.fixture(scope="module")
def deepspeed(folder: Path) -> Reports:
    return ran(folder, "deepspeed")


@needs_deepspeed
@pytest.mark.parametrize("run", ["zero1", "zero3", "straight-zero2", "half-zero2"])
def test_deepspeed_makes_the_update_of_one_process(
    folder: Path, deepspeed: Reports, run: str
) -> None:
    """In float32, after four updates; half-zero2 was stopped in the middle and resumed."""
    assert [rank[run]["status"] for rank in deepspeed] == [0, 0], deepspeed
    right, found = metrics_of(folder / "one-single"), metrics_of(folder / run)
    assert [line["window"] for line in found] == [1, 2, 3, 4]
    for ours, theirs in zip(found, right, strict=True):
        assert ours["units"] == theirs["units"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


@needs_deepspeed
def test_deepspeed_goes_on_with_the_same_bits(folder: Path, deepspeed: Reports) -> None:
    assert [rank["on/half-zero2"]["status"] for rank in deepspeed] == [0, 0], deepspeed
    one, other = (
        torch.load(
            folder / run / "checkpoints/window-00000004.sharded/mp_rank_00_model_states.pt",
            weights_only=False,
        )["module"]
        for run in ("straight-zero2", "half-zero2")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@needs_deepspeed
def test_another_engine_cannot_read_what_deepspeed_wrote(deepspeed: Reports) -> None:
    refused = [rank["other/half-zero2"] for rank in deepspeed]
    assert [rank["status"] for rank in refused] == [2, 2]
    assert "go on with --parallel deepspeed --zero 2 on 2 ranks" in refused[0]["err"]
