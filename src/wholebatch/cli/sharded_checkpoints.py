"""State whose tensors are spread over ranks: taken apart to be saved, put together on any number.

```python
plain, slices = take_apart({"model": model.state_dict(), ...})   # placeholders, and the DTensors
write_slices(folder, slices)                                     # all ranks, each its own
state = put_together(plain, folder, like=where_it_goes)          # sharded as this job shards
```

`like(path)` gives the tensor that a saved one is to be laid out as: a DTensor here becomes one
whatever it was when it was saved, and a plain tensor here is read whole. So a run may go on with
another number of ranks, or unsharded in one process.

Torch describes the slices in a pickle, `.metadata`. It is read by an unpickler that knows the few
classes of such a description and nothing else, so that a file made by somebody else runs no code.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch
from torch import Tensor

from wholebatch.core.plain_files import open_file, reason
from wholebatch.core.safe_loading import hostile
from wholebatch.errors import StateError

__all__ = ["Tree", "put_together", "take_apart", "write_slices"]

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
    """The tree with a placeholder for each DTensor, and the DTensors by a name of their own."""
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
    """Every rank writes its own part, in one collective; on the disk when this returns."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(dict(slices), checkpoint_id=os.fspath(folder))
    except (CheckpointException, OSError) as error:
        raise StateError(f"cannot write checkpoint {folder}: {_one_line(error)}") from error


def put_together(tree: Tree, folder: Path, *, like: Like) -> Tree:
    """The tree that was taken apart, laid out as this job is; all ranks call it together."""
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
            raise StateError(f"{folder} is damaged: {_one_line(error)}") from error
        except (OSError, ValueError, KeyError) as error:
            raise StateError(f"{folder} is damaged: {_one_line(error)}") from error
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
    """A copy of nested dicts, lists and tuples, with `visit` applied to what is in them."""
    if isinstance(value, Mapping) and _MARK not in value:
        return {key: _mapped(visit, (*path, key), item) for key, item in value.items()}
    if type(value) in (list, tuple):
        items = [_mapped(visit, (*path, index), item) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return visit(path, value)


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else type(error).__name__
