"""Checkpoints that survive a kill at any moment.

```python
checkpoints = Checkpoints(Path("runs/mine/checkpoints"))
checkpoints.save({"model": model.state_dict(), ...}, windows=120)
found = checkpoints.load()          # the newest good one; found.damaged names those that are not
```

A file is written under another name, flushed to the disk, and only then renamed: under a
checkpoint's name there is a whole checkpoint or none. The last two are kept. A file is an ordinary
`torch.save` archive of plain values and tensors, read back with `weights_only=True`, so that
loading one cannot run code; every byte is checked against the checksums of the archive first.

A sharded model's checkpoint is a folder: the ranks write their slices into it under another name,
then the first rank adds `rest.pt`, which lists them with their sizes, and renames the folder:

```python
plain, slices = take_apart({"model": model.state_dict(), ...})   # placeholders, and the DTensors
write_slices(folder, slices)                                     # all ranks, each its own
state = put_together(plain, folder, like=where_it_goes)          # sharded as this job shards
```

`like(path)` gives the tensor that a saved one is to be laid out as: a DTensor here becomes one
whatever it was when it was saved, and a plain tensor here is read whole. So a run may go on with
another number of ranks, or unsharded in one process. Torch describes the slices in a pickle,
`.metadata`. It is read by an unpickler that knows the few classes of such a description and nothing
else, so that a file made by somebody else runs no code.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch
from torch import Tensor, nn

from wholebatch.errors import StateError
from wholebatch.plain_files import folder_to_disk, open_file, reason, to_disk
from wholebatch.safe_loading import hostile, load_tensors

_KIND = "wholebatch checkpoint"
_FORMAT = 1
_NAME = re.compile(r"window-(\d+)(?:\+(\d+))?\.(?:pt|sharded)")
_REST = "rest.pt"


@dataclass(frozen=True)
class Found:
    """A checkpoint that was read, and the newer ones that could not be, with the reason."""

    path: Path
    state: dict[str, Any]
    damaged: tuple[tuple[Path, str], ...] = ()


class Checkpoints:
    """The checkpoints of one run, in a folder of their own.

    `window-00000120.pt` was written after 120 windows.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder = folder
        self._keep = keep

    def paths(self) -> list[Path]:
        """Return the checkpoints, oldest first; reading one shows if it is good."""
        if not self.folder.is_dir():
            return []
        found = [(_place(path), path) for path in self.folder.iterdir()]
        return [path for place, path in sorted(found, key=lambda one: one[0] or (-1, 0)) if place]

    def save(self, state: Mapping[str, Any], *, windows: int) -> Path:
        """Write one, whole or not at all, and remove those before the last two."""
        path = self.folder / f"window-{windows:08d}.pt"
        temporary = path.with_suffix(f".writing-{os.getpid()}")
        content = _plain(state, "")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write_file(temporary, content)
            temporary.replace(path)
            folder_to_disk(self.folder)
        except (OSError, RuntimeError) as error:  # torch wraps a full disk in a RuntimeError
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            last = self.paths()
            kept = f"; the last good one is {last[-1]}" if last else ""
            raise StateError(f"cannot write checkpoint {path}: {reason(error)}{kept}") from error
        self._forget()
        return path

    def sharded(self, windows: int) -> tuple[Path, Path]:
        """Return the folder for the slices of the ranks, and the name that `publish` gives it."""
        name = self.folder / f"window-{windows:08d}"
        return name.with_suffix(".writing-sharded"), name.with_suffix(".sharded")

    def publish(self, state: Mapping[str, Any], *, windows: int) -> Path:
        """Add to the ranks' slices what is not in them, and let the folder take its name."""
        written, path = self.sharded(windows)
        try:
            files = {file.name: file.stat().st_size for file in written.iterdir()}
            _write_file(written / _REST, {"files": files, **_plain(state, "")})
            folder_to_disk(written)
            written.replace(path)
            folder_to_disk(self.folder)
        except (OSError, RuntimeError) as error:
            raise StateError(f"cannot write checkpoint {path}: {reason(error)}") from error
        self._forget()
        return path

    def _forget(self) -> None:
        """Remove all but the last two. A folder loses its name first: it is whole or not there."""
        for old in self.paths()[: -self._keep]:
            if old.is_dir():
                old = old.replace(old.with_suffix(".writing-removed"))
            _remove(old)

    def read(self, path: Path) -> Found:
        """Read this one, on the CPU; raise a StateError if it is damaged."""
        return Found(path, _read(path))

    def load(self) -> Found:
        """Read the newest good checkpoint, on the CPU; raise a StateError if there is none."""
        damaged: list[tuple[Path, str]] = []
        for path in reversed(self.paths()):
            try:
                return Found(path, _read(path), tuple(damaged))
            except StateError as error:
                damaged.append((path, str(error)))
        if not damaged:
            raise StateError(
                f"{self.folder}: there is no checkpoint to go on from; begin a new run: leave out "
                "--resume, and give another --out"
            )
        also = f" (and {len(damaged) - 1} older, damaged too)" if len(damaged) > 1 else ""
        raise StateError(f"{damaged[0][1]}{also}; there is no other to go back to")

    def set_aside(self, found: Found) -> None:
        """Rename the damaged ones, so that they are not taken for the newest again."""
        for path, _ in found.damaged:
            path.replace(path.with_suffix(".damaged"))

    def clean(self, which: str = "window-*.writing-*") -> None:
        """Remove what a killed process left half written, or what else the pattern names."""
        for path in self.folder.glob(which):
            _remove(path)


def check_model(model: nn.Module, saved: Mapping[str, Any], *, where: str) -> None:
    """Refuse the state of another model, naming the first parameters that differ."""
    here = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    there = {name: value for name, value in saved.items() if isinstance(value, Tensor)}
    differences = [f"{name} is only in the checkpoint" for name in there if name not in here]
    for name, tensor in here.items():
        if name not in there:
            differences.append(f"{name} is only in this model")
        elif tensor.shape != there[name].shape:
            differences.append(
                f"{name} has shape {_shape(there[name])} there and {_shape(tensor)} here"
            )
        elif tensor.dtype != there[name].dtype:
            differences.append(f"{name} is {_dtype(there[name])} there and {_dtype(tensor)} here")
    if differences:
        shown = "; ".join(differences[:3])
        more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise StateError(f"{where} is of another model: {shown}{more}")


def check_optimizer(optimizer: torch.optim.Optimizer, *, where: str) -> None:
    """Refuse the state of another kind of optimizer, which torch loads without a warning.

    Called with the state loaded: torch fills in the settings that an older version did not have.
    """
    absent = [
        name
        for name in optimizer.defaults
        if name != "differentiable"  # torch adds it to the defaults of every optimizer it loads
        and any(name not in group for group in optimizer.param_groups)
    ]
    if absent:
        raise StateError(
            f"{where} is of another optimizer: what {type(optimizer).__name__} needs, "
            f"{', '.join(absent)}, is not there; resume with the optimizer that it was made with"
        )


def _read(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        return _read_file(path)
    state = _read_file(path / _REST)
    if not isinstance(state.get("files"), dict):
        raise StateError(f"{path} is damaged: {_REST} does not list its files")
    for name, size in state["files"].items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            there = "is not there" if found is None else f"has {found:,} bytes instead of {size:,}"
            raise StateError(f"{path} is damaged: {name} {there}")
    return state


def _write_file(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("wb") as file:
        torch.save({"kind": _KIND, "format": _FORMAT, **content}, file)
        to_disk(file.fileno())


def _read_file(path: Path) -> dict[str, Any]:
    state = load_tensors(path)
    if not isinstance(state, dict) or state.get("kind") != _KIND:
        raise StateError(f"{path} is not a checkpoint of wholebatch train")
    if state.get("format") != _FORMAT:
        raise StateError(
            f"{path} is a checkpoint of format {state.get('format')}, this version reads format "
            f"{_FORMAT}: use the version of wholebatch that wrote it"
        )
    return state


def _plain(value: Any, where: str) -> Any:
    """Return a value that `weights_only=True` reads back; refuse others now, not when resuming."""
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str | bytes | torch.dtype | torch.device):
        return value
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if type(value).__module__ == "numpy" and callable(getattr(value, "item", None)):
        return value.item() if getattr(value, "ndim", 0) == 0 else torch.as_tensor(value)
    if isinstance(value, int | float):  # a subclass, such as an IntEnum
        return int(value) if isinstance(value, int) else float(value)
    raise StateError(
        f"cannot checkpoint {where.lstrip('.')}: it is a {type(value).__name__}, and a checkpoint "
        "holds tensors, numbers, strings, and lists, tuples and dicts of them"
    )


def _place(path: Path) -> tuple[int, int] | None:
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "()"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


Tree: TypeAlias = Any
Where: TypeAlias = tuple[Any, ...]
Like: TypeAlias = Callable[[Where], Tensor | None]

_MARK = "sharded tensor"
_METADATA = ".metadata"
# What torch describes slices of tensors with. Not BytesStorageMetadata: torch reads what that
# stands for with weights_only=False, and we write nothing but tensors.
_DESCRIPTION = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},  # looks a name up in a table of layouts
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath", "WindowsPath"},
    "collections": {"OrderedDict"},
}


def take_apart(tree: Tree) -> tuple[Tree, dict[str, Tensor]]:
    """Return the tree with a placeholder for each DTensor, and the DTensors by name."""
    from torch.distributed.tensor import DTensor

    slices: dict[str, Tensor] = {}

    def visit(path: Where, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        name = "/".join(map(str, path))
        slices[name] = value.detach()
        return {_MARK: name, "shape": list(value.shape), "dtype": value.dtype}

    return _mapped(visit, (), tree), slices


def write_slices(folder: Path, slices: Mapping[str, Tensor]) -> None:
    """Write the part of this rank, in one collective; it is on the disk when this returns."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(dict(slices), checkpoint_id=os.fspath(folder))
    except (CheckpointException, OSError) as error:
        raise StateError(f"cannot write checkpoint {folder}: {_last_line(error)}") from error


def put_together(tree: Tree, folder: Path, *, like: Like) -> Tree:
    """Return the tree that was taken apart, laid out as this job is; all ranks call it together."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.tensor import DTensor, distribute_tensor

    wanted: dict[str, Tensor] = {}

    def visit(path: Where, value: Any) -> Any:
        there = like(path)
        if isinstance(value, Tensor):
            if isinstance(there, DTensor) and value.shape == there.shape and value.dim():
                whole = value.to(there.device)
                return distribute_tensor(whole, there.device_mesh, there.placements)
            return value
        if not (isinstance(value, Mapping) and _MARK in value):
            return value
        shape, dtype = torch.Size(value["shape"]), value["dtype"]
        if isinstance(there, DTensor) and there.shape == shape:
            empty: Tensor = torch.empty_like(there, dtype=dtype)
        else:
            empty = torch.empty(shape, dtype=dtype)
        wanted[value[_MARK]] = empty
        return empty

    tree = _mapped(visit, (), tree)
    if wanted:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # one process: torch says that it is one
                load(wanted, storage_reader=_reader(folder))
        except StateError:
            raise
        except CheckpointException as error:
            if any(isinstance(one, pickle.UnpicklingError) for one, _ in error.failures.values()):
                raise hostile(folder, None) from None
            raise StateError(f"{folder} is damaged: {_last_line(error)}") from error
        except (OSError, ValueError, KeyError) as error:
            raise StateError(f"{folder} is damaged: {_last_line(error)}") from error
    return tree


def _reader(folder: Path) -> Any:
    """Return torch's reader of a folder, with the description that was read here."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    described: Metadata = _description(folder)

    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Metadata:
            described.storage_meta = described.storage_meta or StorageMeta()
            described.storage_meta.load_id = self.load_id
            return described

    return Reader(os.fspath(folder))


def _description(folder: Path) -> Any:
    """Return what `.metadata` says of the slices; every file it names must be in the folder."""
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    path = folder / _METADATA
    try:
        with open_file(path) as file:
            found = _Unpickler(file, path).load()
        slices = found.state_dict_metadata.values()
        names = {one.relative_path for one in found.storage_data.values()}
    except StateError:
        raise
    except OSError as error:
        raise StateError(f"{path} cannot be read: {reason(error)}") from error
    except Exception as error:  # an unpickler raises whatever its bytes lead it to
        raise StateError(f"{path} is damaged: it does not describe slices of tensors") from error
    if type(found) is not Metadata or not all(type(one) is TensorStorageMetadata for one in slices):
        raise StateError(f"{path} is damaged: it describes something other than tensors")
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise StateError(f"{path} is damaged: there is no file {name!r} beside it")
    return found


class _Unpickler(pickle.Unpickler):
    """Knows what a description of tensor slices is made of; everything else is refused."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if name in _DESCRIPTION.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise hostile(self._path, f"{module}.{name}")


def _mapped(visit: Callable[[Where, Any], Any], path: Where, value: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples, with `visit` applied to their leaves."""
    if isinstance(value, Mapping) and _MARK not in value:
        return {key: _mapped(visit, (*path, key), item) for key, item in value.items()}
    if type(value) in (list, tuple):
        items = [_mapped(visit, (*path, index), item) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return visit(path, value)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else type(error).__name__
