"""A checkpoint is whole or not there, is read safely, and a damaged one is never loaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.helpers import assert_same_bits
from wholebatch.cli import checkpoints as module
from wholebatch.cli.checkpoints import Checkpoints
from wholebatch.cli.parallel_ranks import World
from wholebatch.errors import StateError

ALONE = World(0, device=torch.device("cpu"))


def state(value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((50, 40), value)},
        "numbers": [1, 2.5, None, True, "word", b"bytes", (3, torch.float32)],
    }


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "new" / "folder", ALONE)
    assert checkpoints.load() is None
    path = checkpoints.save(state(), windows=3)
    assert path.name == "window-00000003"
    loaded = checkpoints.load()
    assert loaded is not None
    assert loaded.path == path
    for name, value in state().items():
        assert_same_bits(loaded.state[name], value)


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flip": flipped,
    "cut": lambda content: content[: len(content) // 2],
    "append": lambda content: content + b"\0",
    "empty": lambda content: b"",
    "text": lambda content: b"this is not a checkpoint\n",
}


@pytest.mark.parametrize("name", ["state.pt", "checksums.json"])
@pytest.mark.parametrize("way", [*DAMAGES, "remove"])
def test_damaged_files_are_never_loaded(tmp_path: Path, way: str, name: str) -> None:
    checkpoints = Checkpoints(tmp_path, ALONE)
    good = checkpoints.save(state(1), windows=1)
    bad = checkpoints.save(state(2), windows=2)
    if way == "remove":
        (bad / name).unlink()
    else:
        (bad / name).write_bytes(DAMAGES[way]((bad / name).read_bytes()))
    with pytest.raises(StateError, match=f"{bad} is damaged: .*to go on from {good.name}"):
        checkpoints.load()
    shutil.rmtree(bad)
    loaded = checkpoints.load()
    assert loaded is not None
    assert_same_bits(loaded.state["model"], state(1)["model"])


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_a_hostile_one_is_told(tmp_path: Path) -> None:
    """Its checksums are right, and still no code of it runs."""
    trap = tmp_path / "sprung"
    checkpoints = Checkpoints(tmp_path, ALONE)
    bad = checkpoints.save(state(2), windows=2)
    torch.save({"format": Trap(trap)}, bad / "state.pt")
    sums = {"state.pt": module._checksum(bad / "state.pt")}
    (bad / "checksums.json").write_text(str(sums).replace("'", '"'))
    with pytest.raises(StateError, match="not a checkpoint of wholebatch, or it is unsafe"):
        checkpoints.load()
    assert not trap.exists()


def test_a_checkpoint_of_another_version_is_not_loaded(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, ALONE)
    path = checkpoints.save(state(), windows=1)
    torch.save({"format": 1, "model": {}}, path / "state.pt")
    sums = {"state.pt": module._checksum(path / "state.pt")}
    (path / "checksums.json").write_text(str(sums).replace("'", '"'))
    with pytest.raises(StateError, match=r"another version of wholebatch \(an earlier one\)"):
        checkpoints.load()
    assert checkpoints.paths() == [path]  # it is not damaged, and keeps its name


def test_what_could_not_be_read_back_is_refused_when_saving(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"cannot checkpoint optimizer\.state\.1: it is a set"):
        Checkpoints(tmp_path, ALONE).save({"optimizer": {"state": [1, {2}]}}, windows=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["writing", "flushing", "renaming"])
def test_a_failure_at_any_moment_leaves_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    checkpoints = Checkpoints(tmp_path, ALONE)
    good = checkpoints.save(state(1), windows=1)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    if moment == "writing":
        monkeypatch.setattr(torch, "save", full)
    elif moment == "flushing":
        monkeypatch.setattr(module, "to_disk", full)
    else:
        monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StateError, match=f"No space left on device; the last good one is {good}"):
        checkpoints.save(state(2), windows=2)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == [good.name]


def test_what_a_killed_writer_left_is_not_read_and_is_cleaned(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, ALONE)
    good = checkpoints.save(state(1), windows=1)
    shutil.copytree(good, tmp_path / "window-00000002.writing")
    loaded = checkpoints.load()
    assert loaded is not None
    assert loaded.path == good
    checkpoints.clean()
    assert list(tmp_path.iterdir()) == [good]


def test_an_interrupted_removal_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed while it removes files: what has a checkpoint's name is whole."""
    checkpoints = Checkpoints(tmp_path, ALONE)
    checkpoints.save(state(1), windows=1)
    remove = shutil.rmtree

    def killed(path: Path, **options: Any) -> None:
        if (path / "state.pt").exists():
            (path / "state.pt").unlink()
            raise KeyboardInterrupt
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(state(2), windows=1)
    monkeypatch.undo()
    for path in checkpoints.paths():
        assert module._problem_of(path) is None
    checkpoints.save(state(3), windows=1)
    loaded = checkpoints.load()
    assert loaded is not None
    assert_same_bits(loaded.state["model"], state(3)["model"])
