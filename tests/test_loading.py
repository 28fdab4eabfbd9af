"""Files that somebody else made: no code of theirs is run, and none is waited for."""

from __future__ import annotations

import os
import pickle
import re
import sys
import types
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wholebatch
from wholebatch.cli.checkpoints import Checkpoints, put_together, take_apart
from wholebatch.errors import StateError
from wholebatch.plain_files import open_file, read_json
from wholebatch.safe_loading import load_tensors

HOSTILE = "is hostile, or not a checkpoint of wholebatch: loading it would run "


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.target),))


def sharded(folder: Path) -> dict[str, Any]:
    """Write a sharded checkpoint of one process, and return the tree with its placeholders."""
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"model/w": torch.arange(6.0)}, checkpoint_id=os.fspath(folder))
    return {"w": {"sharded tensor": "model/w", "shape": [6], "dtype": torch.float32}}


def read(tree: dict[str, Any], folder: Path) -> Any:
    return put_together(tree, folder, like=lambda _: None)


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
    assert said.startswith(f"{path} is hostile, or not a checkpoint of wholebatch: loading it ")
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


def test_what_is_allowed_by_name_is_built(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"where": Path("here")}, path)
    refused(lambda: load_tensors(path), tmp_path / "sprung")
    kind = type(Path("here"))
    assert load_tensors(path, also=[kind])["where"] == Path("here")


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


def test_slices_are_read_as_they_were_written(tmp_path: Path) -> None:
    tree = sharded(tmp_path)
    assert read(tree, tmp_path)["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert take_apart({"w": torch.ones(2)})[1] == {}


def test_the_description_of_slices_runs_no_code(tmp_path: Path) -> None:
    tree, trap = sharded(tmp_path / "c"), tmp_path / "sprung"
    (tmp_path / "c/.metadata").write_bytes(pickle.dumps(Trap(trap)))
    said = refused(lambda: read(tree, tmp_path / "c"), trap)
    assert f"{tmp_path / 'c/.metadata'} {HOSTILE}posix.mkdir" in said


def test_a_description_with_a_trap_inside_runs_no_code(tmp_path: Path) -> None:
    tree, trap = sharded(tmp_path / "c"), tmp_path / "sprung"
    path = tmp_path / "c/.metadata"
    found = pickle.loads(path.read_bytes())
    found.planner_data = {"w": Trap(trap)}
    path.write_bytes(pickle.dumps(found))
    assert f"{HOSTILE}posix.mkdir" in refused(lambda: read(tree, tmp_path / "c"), trap)


def test_bytes_instead_of_a_tensor_are_not_unpickled(tmp_path: Path) -> None:
    """Torch reads what BytesStorageMetadata stands for with weights_only=False."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    tree, trap = sharded(tmp_path / "c"), tmp_path / "sprung"
    path = tmp_path / "c/.metadata"
    found = pickle.loads(path.read_bytes())
    torch.save(Trap(trap), tmp_path / "c/trap.distcp")
    [info] = found.storage_data.values()
    info.relative_path, info.offset = "trap.distcp", 0
    info.length = (tmp_path / "c/trap.distcp").stat().st_size
    found.state_dict_metadata = {"model/w": BytesStorageMetadata()}
    found.storage_data = {MetadataIndex("model/w"): info}
    path.write_bytes(pickle.dumps(found))
    said = refused(lambda: read(tree, tmp_path / "c"), trap)
    assert "BytesStorageMetadata" in said


def test_a_slice_with_a_trap_runs_no_code(tmp_path: Path) -> None:
    tree, trap = sharded(tmp_path / "c"), tmp_path / "sprung"
    path = tmp_path / "c/.metadata"
    found = pickle.loads(path.read_bytes())
    [info] = found.storage_data.values()
    torch.save(Trap(trap), tmp_path / "c" / info.relative_path)
    info.offset, info.length = 0, (tmp_path / "c" / info.relative_path).stat().st_size
    path.write_bytes(pickle.dumps(found))
    said = refused(lambda: read(tree, tmp_path / "c"), trap)
    assert "is hostile, or not a checkpoint" in said


def test_a_description_that_leads_out_of_its_folder(tmp_path: Path) -> None:
    tree = sharded(tmp_path / "c")
    path = tmp_path / "c/.metadata"
    found = pickle.loads(path.read_bytes())
    [info] = found.storage_data.values()
    (tmp_path / "c" / info.relative_path).rename(tmp_path / "outside")
    info.relative_path = "../outside"
    path.write_bytes(pickle.dumps(found))
    said = refused(lambda: read(tree, tmp_path / "c"), tmp_path / "sprung")
    assert "there is no file '../outside' beside it" in said


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps([1, 2])])
def test_a_description_that_is_none(tmp_path: Path, content: bytes) -> None:
    tree = sharded(tmp_path)
    (tmp_path / ".metadata").write_bytes(content)
    said = refused(lambda: read(tree, tmp_path), tmp_path / "sprung")
    assert said.startswith(f"{tmp_path / '.metadata'} is damaged: it does not describe slices")


@pytest.mark.timeout(20)
def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "window-00000001.pt"
    os.mkfifo(path)
    with pytest.raises(StateError, match=r"cannot be read: it is a FIFO, not a file"):
        Checkpoints(tmp_path).load()
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


def test_deepspeed_reads_its_files_without_their_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own reader runs whatever a pickle asks for: ours stands in its place while it loads."""
    from wholebatch.cli.training_engines import _loads_without_code

    kinds = {
        "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
        "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
        "deepspeed.utils.tensor_fragment": ("fragment_address",),
    }
    for package in ("", ".runtime", ".runtime.fp16", ".runtime.zero", ".utils"):
        monkeypatch.setitem(sys.modules, f"deepspeed{package}", types.ModuleType("package"))
    for module, names in kinds.items():
        fake = types.ModuleType(module)
        for name in names:
            setattr(fake, name, type(name, (), {"__module__": module}))
        monkeypatch.setitem(sys.modules, module, fake)

    class Reader:
        def load(self, path: str, map_location: Any = None) -> Any:
            return torch.load(path, map_location=map_location, weights_only=False)

    engine = types.SimpleNamespace(checkpoint_engine=Reader())
    path, trap = tmp_path / "x", tmp_path / "sprung"
    scaler = sys.modules["deepspeed.runtime.fp16.loss_scaler"].LossScaler
    with _loads_without_code(engine):
        torch.save({"scaler": scaler(), "step": torch.tensor(3)}, path)
        assert type(engine.checkpoint_engine.load(str(path))["scaler"]) is scaler
        torch.save(Trap(trap), path)
        said = refused(lambda: engine.checkpoint_engine.load(str(path)), trap)
    assert f"{HOSTILE}posix.mkdir" in said
    assert "load" not in vars(engine.checkpoint_engine)  # as it was


def test_nothing_else_in_the_package_unpickles() -> None:
    """A new file format is to be read by `load_tensors`, or to be added here with its reason."""
    may = {
        "safe_loading.py": "the one reader",
        "cli/checkpoints.py": "an unpickler that knows a few classes",
        "cli/parallel_ranks.py": "bytes of the other ranks, with weights_only=True",
    }
    package = Path(wholebatch.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"torch\.load\(|pickle\.(load|Unpickler)|weights_only=False", path.read_text())
    }
    assert found == set(may)
