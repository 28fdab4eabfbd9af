"""The examples run, and show what they say."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests import processes
from tests.distributed.launch import torchrun
from tests.support import EXACT

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_rounding(text: str) -> str:
    """Leave out what depends on the machine: the digits of rounding errors, and memory."""
    return re.sub(r"[\d.]+e[+-]\d\d|\b0(?= off)|[\d.]+(?= MiB)", "#", text)


def assert_listed(name: str, printed: str) -> None:
    """The last line that an example printed is the one in the index."""
    rows = (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    [row] = [row for row in rows if row.startswith(f"| [{name}.py]({name}.py) |")]
    shown = re.fullmatch(r"Shown: (.*\.)", printed.splitlines()[-1])
    assert shown is not None
    listed = without_rounding(row.split(" | ")[-1].removesuffix(" |"))
    assert listed.lower() == without_rounding(shown[1]).lower()


def test_all_are_listed() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    for path in FOLDER.glob("*.py"):
        assert f"[{path.name}]({path.name})" in text


@pytest.mark.parametrize("name", ["dpo", "muon"])
def test_before_and_after(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon came with torch 2.9")
    errors = example(name).main()
    after = [error for loop, error in errors.items() if loop.startswith("after")]
    before = [error for loop, error in errors.items() if loop.startswith("before")]
    assert len(before) == len(after) > 0
    assert max(after) <= EXACT
    assert min(before) > 0.1
    assert_listed(name, capsys.readouterr().out)


@pytest.mark.parametrize("name", ["deepspeed_zero", "pipeline_stages"])
def test_one_process_says_how_to_start_it(name: str) -> None:
    if name == "deepspeed_zero":
        pytest.importorskip("deepspeed")
    alone = {key: value for key, value in os.environ.items() if key != "RANK"}
    environment = {**alone, **processes.ENVIRONMENT}
    done = processes.run(FOLDER / f"{name}.py", cwd=ROOT, environment=environment, timeout=120)
    assert done.returncode == 1
    command = f"torchrun --standalone --nproc-per-node 2 examples/{name}.py"
    before = "DS_ACCELERATOR=cpu " * (name == "deepspeed_zero")
    assert f"run me with torchrun: {before}{command}" in done.stderr


@pytest.mark.parametrize(
    ("script", "page", "number"),
    [
        ("accelerate_loop", "accelerate", 0),
        ("fabric_loop", "lightning", 1),
        ("lightning_trainer", "lightning", 0),
        ("transformers_trainer", "transformers", 0),
    ],
)
def test_scripts_of_trainers_show_the_change_of_their_page(
    script: str, page: str, number: int
) -> None:
    text = (FOLDER.parent / f"docs/integrations/{page}.md").read_text(encoding="utf-8")
    diff = re.findall(r"^```diff\n(.*?)^```", text, re.M | re.S)[number]
    source = (FOLDER / f"integrations/{script}.py").read_text(encoding="utf-8")
    shown = re.findall(r"^    ([+-]) +(.*)$", source.split('"""')[1], re.M)
    wanted = [(line[0], line[1:].strip()) for line in diff.splitlines() if line[0] in "+-"]
    assert sorted(shown) == sorted(wanted)


# DeepSpeed would compile a faster all-reduce at the first start, for a minute: gloo will do.
WITHOUT_COMPILING = """
import runpy
import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
runpy.run_path({!r}, run_name="__main__")
"""


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "most"), [("deepspeed_zero", 1e-5), ("pipeline_stages", EXACT)])
def test_engines(name: str, most: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = FOLDER / f"{name}.py"
    if name == "deepspeed_zero":
        pytest.importorskip("deepspeed")
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
        script = tmp_path / "example.py"
        script.write_text(WITHOUT_COMPILING.format(str(FOLDER / f"{name}.py")))
    printed = torchrun(script, 2).stdout
    [results] = re.findall(r"(\S+) off\.", printed)
    assert float(results) <= most
    shown = next(line for line in printed.splitlines() if line.startswith("Shown"))
    assert_listed(name, shown)


def test_resnet_batchnorm(capsys: pytest.CaptureFixture[str]) -> None:
    rows = example("resnet_batchnorm").main(updates=2)
    weights, statistics, peak = rows["wholebatch"]
    assert weights <= EXACT
    assert statistics <= EXACT
    assert peak <= 1.1 * rows["undivided"][2]
    weights, statistics, peak = rows["wholebatch, checkpointed"]
    assert weights <= EXACT
    assert statistics <= EXACT
    assert peak < 0.6 * rows["undivided"][2]
    weights, statistics, peak = rows["plain accumulation"]
    assert weights > 0.1
    assert statistics > 0.1
    assert peak < 0.5 * rows["undivided"][2]
    assert_listed("resnet_batchnorm", capsys.readouterr().out)


@pytest.mark.parametrize("name", ["moe_load_balance", "normalised_advantage"])
def test_other_losses_of_the_whole_batch(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    errors = example(name).main()
    assert errors["wb.Coupled"] <= EXACT
    assert errors["plain accumulation"] > 1e-3
    assert_listed(name, capsys.readouterr().out)


def test_optimizer_accumulation(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optimi")
    rows = example("optimizer_accumulation").main()
    error, gradients = rows["optimizer accumulation"]
    assert error > 0.1
    assert gradients < 0.8 * rows["undivided"][1]
    assert rows["wb.WholeBatch"][0] <= EXACT
    assert_listed("optimizer_accumulation", capsys.readouterr().out)


@pytest.mark.slow
def test_diffusion(capsys: pytest.CaptureFixture[str]) -> None:
    results = example("diffusion").main()
    assert max(results[f"split by {size}"] for size in (1, 8, 17)) <= EXACT
    assert results["verified"]
    assert results["loss of the EMA"] < 0.5 * results["first loss"]
    assert results["usual loop"] > 0.1
    assert_listed("diffusion", capsys.readouterr().out)


@pytest.mark.parametrize(
    "name",
    [
        "timm, train.py",
        "diffusers, train_unconditional.py",
        "nanoGPT, train.py, masked targets",
        "torchvision detection, loss / K",
        "open_clip, train.py --accum-freq",
        "denoising-diffusion-pytorch",
    ],
)
def test_loops_of_public_scripts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.syspath_prepend(str(FOLDER.parent / "benchmarks"))
    from compare.public_loops import LOOPS

    _, errors = LOOPS[name]
    own, ours = errors()
    assert ours <= EXACT
    page = (FOLDER.parent / "docs" / "split-dependence.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| {re.escape(name)} \|.* \*\*{own:.0%}\*\* \|", page, flags=re.M)


def test_the_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells run one after the other, and print what it shows."""
    cells = json.loads((FOLDER / "first_steps.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        exec("".join(cell["source"]), names)
        shown = "".join(line for output in cell["outputs"] for line in output["text"])
        assert without_rounding(capsys.readouterr().out) == without_rounding(shown)
