"""Files that somebody else made: no code of theirs is run, and none is waited for."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wholebatch
from wholebatch.cli.safe_loading import load_tensors
from wholebatch.errors import StateError
from wholebatch.plain_files import open_file, read_json

HOSTILE = "is not a checkpoint of wholebatch, or it is unsafe: loading it would run "


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.target),))


def refused(load: Callable[[], Any], trap: Path) -> str:
    """Return the message of a load that must fail without springing the trap."""
    with pytest.raises(StateError) as raised:
        load()
    assert not trap.exists()
    said = str(raised.value)
    assert "\n" not in said
    for advice in ("weights_only", "add_safe_globals", "allowlist"):
        assert advice not in said
    return said


@pytest.mark.parametrize("protocol", [2, 4])
def test_an_archive_of_torch_runs_no_code(tmp_path: Path, protocol: int) -> None:
    path, trap = tmp_path / "window-00000001.pt", tmp_path / "sprung"
    torch.save({"kind": Trap(trap)}, path, pickle_protocol=protocol)
    said = refused(lambda: load_tensors(path), trap)
    assert said.startswith(
        f"{path} is not a checkpoint of wholebatch, or it is unsafe: loading it "
    )
    assert "posix.mkdir" in said if protocol == 2 else "more than tensors and plain values" in said


def test_a_class_of_torch_itself_is_not_built(tmp_path: Path) -> None:
    path = tmp_path / "whole-model.pt"
    torch.save(torch.nn.Linear(2, 2), path)
    said = refused(lambda: load_tensors(path), tmp_path / "sprung")
    assert f"{HOSTILE}torch.nn.modules.linear.Linear. It was not loaded" in said


def test_a_bare_pickle_runs_no_code(tmp_path: Path) -> None:
    path, trap = tmp_path / "window-00000001.pt", tmp_path / "sprung"
    path.write_bytes(pickle.dumps(Trap(trap)))
    assert "is damaged: File is not a zip file" in refused(lambda: load_tensors(path), trap)


def test_lists_in_lists_without_end(tmp_path: Path) -> None:
    path = tmp_path / "deep.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("deep/data.pkl", b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".")
        archive.writestr("deep/version", "3\n")
        archive.writestr("deep/byteorder", "little")
    state: Any = load_tensors(path)  # torch's unpickler does not recurse
    assert isinstance(state, list)
    for _ in range(199_999):  # taken apart by hand: freeing it would recurse
        [state] = state


@pytest.mark.timeout(20)
def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "window-00000001.pt"
    os.mkfifo(path)
    with pytest.raises(StateError, match=r"cannot be read: it is a FIFO, not a file"):
        load_tensors(path)
    with pytest.raises(OSError, match="it is a FIFO, not a file"):
        read_json(path)


def test_what_else_a_path_may_be(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="it is a folder, not a file"):
        open_file(tmp_path)
    with pytest.raises(OSError, match="is not possible: embedded null byte"):
        open_file(tmp_path / "a\0b")
    with pytest.raises(OSError, match="it is a device, not a file"):
        open_file(Path("/dev/zero"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        open_file(tmp_path / "loop")


def test_json_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for content, said in (
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
        (b"", "Expecting value"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=said):
            read_json(path)


def test_nothing_else_in_the_package_unpickles() -> None:
    """A new file format is to be read by `load_tensors`, or to be added here with its reason."""
    may = {
        "cli/safe_loading.py": "the one reader",
        "cli/parallel_ranks.py": "bytes of the other ranks, with weights_only=True",
        "split_invariance/rank_jobs.py": "results of processes that it started itself",
    }
    package = Path(wholebatch.__file__).parent
    names = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"torch\.load\(|pickle\.(load|Unpickler)|weights_only=False", path.read_text())
    }
    assert names == set(may)
