"""State whose tensors are spread over ranks: taken apart to be saved, put together on any number.

```python
plain, slices = take_apart({"model": model.state_dict(), ...})   # placeholders, and the DTensors
write_slices(folder, slices)                                     # all ranks, each its own
state = put_together(plain, folder, like=where_it_goes)          # sharded as this job shards
```

`like(path)` gives the tensor that a saved one is to be laid out as: a DTensor here becomes one
whatever it was when it was saved, and a plain tensor here is read whole. So a run may go on with
another number of ranks, or unsharded in one process.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wholebatch.errors import StateError

__all__ = ["Tree", "put_together", "take_apart", "write_slices"]

Tree: TypeAlias = Any
Where: TypeAlias = tuple[Any, ...]
Like: TypeAlias = Callable[[Where], Tensor | None]

_MARK = "sharded tensor"


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
                load(wanted, checkpoint_id=os.fspath(folder))
        except (CheckpointException, OSError, ValueError, KeyError) as error:
            raise StateError(f"{folder} is damaged: {_one_line(error)}") from error
    return tree


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
