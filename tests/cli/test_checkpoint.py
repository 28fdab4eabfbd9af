"""A checkpoint is whole or not there, is read safely, and says what is wrong with it."""

from __future__ import annotations

import collections
import copy
import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.cli.helpers import assert_same_bits
from tests.test_loading import Trap
from wholebatch import plain_files
from wholebatch.cli import checkpoints as module
from wholebatch.cli.checkpoints import Checkpoints, check_model, check_optimizer
from wholebatch.errors import OptionError, StateError
from wholebatch.plain_files import write_atomically


def state(value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((50, 40), value)},
        "numbers": [1, 2.5, None, True, "word", b"bytes", (3, torch.float32)],
    }


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "new" / "folder")
    path = checkpoints.save(state(), windows=3)
    assert path.name == "window-00000003.pt"
    found = checkpoints.load()
    assert found.path == path
    assert found.damaged == ()
    for name, value in state().items():
        assert_same_bits(found.state[name], value)


def test_keeps_the_last_two_in_the_order_of_windows(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for windows in (0, 9, 10):
        checkpoints.save(state(windows), windows=windows)
    assert [p.name for p in checkpoints.paths()] == ["window-00000009.pt", "window-00000010.pt"]
    assert checkpoints.load().state["model"]["weight"][0, 0].item() == pytest.approx(10.0)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text"])
def test_goes_back_to_the_one_before_a_damaged_one(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    good = checkpoints.save(state(1), windows=1)
    bad = checkpoints.save(state(2), windows=2)
    hurt(bad, damage)
    found = checkpoints.load()
    assert found.path == good
    assert found.state["model"]["weight"][0, 0] == 1
    [(path, reason)] = found.damaged
    assert path == bad
    assert str(bad) in reason
    assert "damaged" in reason
    assert "\n" not in reason
    checkpoints.set_aside(found)
    assert checkpoints.paths() == [good]
    assert bad.with_suffix(".damaged").exists()


def test_all_damaged_is_one_clear_line(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for windows in (1, 2):
        hurt(checkpoints.save(state(), windows=windows), "cut")
    with pytest.raises(
        StateError, match=r"window-00000002.pt is damaged.*and 1 older, damaged too"
    ):
        checkpoints.load()


def test_none_there(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="there is no checkpoint"):
        Checkpoints(tmp_path / "nothing").load()


def hurt(path: Path, damage: str) -> None:
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        content[len(content) // 2] ^= 0x10  # one bit, in the middle of the weights
    elif damage == "empty":
        content = bytearray()
    else:
        content = bytearray(b"this is not a checkpoint at all\n" * 9)
    path.write_bytes(content)


def test_a_foreign_file_of_torch_is_not_taken(tmp_path: Path) -> None:
    torch.save({"model": {}}, tmp_path / "window-00000001.pt")
    with pytest.raises(StateError, match="is not a checkpoint of wholebatch train"):
        Checkpoints(tmp_path).load()


def test_a_hostile_one_is_told_and_the_one_before_it_is_used(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    checkpoints = Checkpoints(tmp_path)
    good = checkpoints.save(state(1), windows=1)
    torch.save({"kind": Trap(trap)}, tmp_path / "window-00000002.pt")
    found = checkpoints.load()
    assert found.path == good
    [(_, reason)] = found.damaged
    assert "is hostile, or not a checkpoint of wholebatch: loading it would run posix.mkdir" in (
        reason
    )
    assert not trap.exists()


def test_what_could_not_be_read_back_is_refused_when_saving(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"cannot checkpoint optimizer\.state\[1\]: it is a set"):
        Checkpoints(tmp_path).save({"optimizer": {"state": [1, {2}]}}, windows=1)
    assert list(tmp_path.iterdir()) == []


def test_kinds_of_dicts_and_numbers_become_plain(tmp_path: Path) -> None:
    import numpy

    kinds = {
        "a": collections.OrderedDict(x=1),
        "b": collections.defaultdict(list, {0: [1]}),
        "c": numpy.float64(2.5),
        "d": numpy.arange(3),
        "e": nn.Parameter(torch.ones(2)),
    }
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(kinds, windows=1)
    found = checkpoints.load().state
    assert found["a"] == {"x": 1}
    assert found["b"] == {0: [1]}
    assert found["c"] == 2.5
    assert found["d"].tolist() == [0, 1, 2]
    assert_same_bits(found["e"], torch.ones(2))


@pytest.mark.parametrize("moment", ["writing", "flushing", "renaming"])
def test_a_failure_at_any_moment_leaves_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    checkpoints = Checkpoints(tmp_path)
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
    assert checkpoints.load().path == good


def test_what_a_killed_writer_left_is_not_read_and_is_cleaned(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    good = checkpoints.save(state(1), windows=1)
    (tmp_path / "window-00000002.writing-77").write_bytes(b"half")
    assert checkpoints.load().path == good
    checkpoints.clean()
    assert list(tmp_path.iterdir()) == [good]


def test_another_model_is_named_by_what_differs() -> None:
    here = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    check_model(here, here.state_dict(), where="x.pt")
    wider = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    with pytest.raises(
        StateError,
        match=r"x.pt is of another model: 0.weight has shape 5×4 there and 3×4 here; 0.bias.*",
    ):
        check_model(here, wider.state_dict(), where="x.pt")
    with pytest.raises(StateError, match=r"weight is only in the checkpoint.*and 3 more"):
        check_model(here, nn.Linear(4, 3).state_dict(), where="x.pt")
    with pytest.raises(StateError, match=r"0.weight is float64 there and float32 here"):
        check_model(here, copy.deepcopy(here).double().state_dict(), where="x.pt")


def test_another_kind_of_optimizer_is_noticed() -> None:
    model = nn.Linear(4, 3)
    adam, sgd = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    check_optimizer(adam, where="x.pt")
    sgd.load_state_dict(adam.state_dict())  # torch itself says nothing until the first step
    with pytest.raises(StateError, match=r"x.pt is of another optimizer: what SGD needs, momentum"):
        check_optimizer(sgd, where="x.pt")


def test_an_optimizer_of_ones_own_is_its_own() -> None:
    """Torch adds "differentiable" to the defaults of what it loads, but not to the groups."""

    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

    model = nn.Linear(4, 3)
    own = Own(model.parameters())
    own.load_state_dict(Own(model.parameters()).state_dict())
    check_optimizer(own, where="x.pt")


def test_a_full_disk_leaves_the_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    write_atomically(path, "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(plain_files, "to_disk", full)
    with pytest.raises(StateError, match=r"config.json: cannot be written: No space left on dev"):
        write_atomically(path, "new")
    with pytest.raises(OptionError, match=r"config.json: cannot be written: No space left on dev"):
        plain_files.write_json(path, {"new": 1})
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("config.json", "old")]


def test_write_atomically_replaces(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write_atomically(path, "old")
    write_atomically(path, "new")
    assert path.read_text(encoding="utf-8") == "new"
    assert list(tmp_path.iterdir()) == [path]
