"""`wholebatch verify SCRIPT`: the user's files survive, it ends early, and JSON stands alone."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from wholebatch.cli import main

TRAIN = """
import os, sys, torch
from torch import nn
from torch.nn import functional as F

print("printed by the script")
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
start = 0
if os.path.exists("best.pt"):
    state = torch.load("best.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    start = state["epoch"]
samples = [(torch.randn(4), i % 3) for i in range(22)]
for epoch in range(start, 3):
    assert epoch < 2, "the second epoch was trained to its end"
    for i, (x, y) in enumerate(torch.utils.data.DataLoader(samples, batch_size=2)):
        (F.cross_entropy(model(x), y) / 4).backward()
        if (i + 1) % 4 == 0 or i == 10:
            optimizer.step()
            optimizer.zero_grad()
    for x, y in torch.utils.data.DataLoader(samples, batch_size=2):
        sys.exit("an evaluation has begun")
    torch.save({}, "best.pt")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_ends_after_the_first_pass_with_a_new_loader_in_every_epoch(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "train.py"]) == 1
    out, err = capsys.readouterr()
    assert "Wrong: nominal count: train.py: `/ 4` where " in out
    assert "3 windows seen; the end of the data was among them" in out
    assert err.startswith("Running train.py for real, in a copy of its folder")
    assert "an evaluation has begun" not in err


def test_json_stands_alone_and_the_scripts_output_goes_to_stderr(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--json", "train.py"]) == 1
    out, err = capfd.readouterr()
    assert json.loads(out)["mistakes"] == ["nominal-count"]
    assert "printed by the script" in err


def test_files_that_the_script_writes_are_thrown_away(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = TRAIN.replace('        sys.exit("an evaluation has begun")', "        pass")
    script = script.replace(
        "for epoch", 'torch.save({}, "best.pt")\nos.remove("notes.txt")\nfor epoch'
    )
    script = script.replace('os.path.exists("best.pt")', "False")
    (folder / "train.py").write_text(script, encoding="utf-8")
    (folder / "best.pt").write_bytes(b"precious")
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    before = sorted(folder.iterdir())
    assert main(["verify", "train.py"]) == 1
    assert sorted(folder.iterdir()) == before
    assert (folder / "best.pt").read_bytes() == b"precious"
    assert Path.cwd() == folder
    capsys.readouterr()


def test_a_folder_that_is_too_large_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("wholebatch.cli.watched_script._MOST_BYTES", 1000)
    (folder / "data.bin").write_bytes(b"0" * 2000)
    assert main(["verify", "train.py"]) == 2
    assert "replace its data by a link" in capsys.readouterr().err
    (folder.parent / "elsewhere.bin").write_bytes(b"0" * 2000)
    (folder / "data.bin").unlink()
    (folder / "train.py").write_text(
        "with open('data.bin') as file: assert file.read(1) == '0'", encoding="utf-8"
    )
    (folder / "data.bin").symlink_to(folder.parent / "elsewhere.bin")
    assert main(["verify", "train.py"]) == 3, "a link is a link in the copy, too"
    assert "no backward was seen" in capsys.readouterr().out


def test_a_recipe_with_a_part_to_be_run_is_a_script(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = textwrap.dedent(
        """
        import torch

        def model():
            return torch.nn.Linear(4, 3)

        def data():
            raise SystemExit("used as a recipe")

        def loss(model, micro):
            raise SystemExit("used as a recipe")

        if __name__ == "__main__":
            net = model()
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            for x in torch.randn(4, 2, 4):
                net(x).square().mean().backward()
            optimizer.step()
        """
    )
    (folder / "both.py").write_text(both, encoding="utf-8")
    assert main(["verify", "both.py"]) == 1
    assert "not divided" in capsys.readouterr().out
