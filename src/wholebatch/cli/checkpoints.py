"""Checkpoints that survive a kill at any moment. A damaged one is never loaded.

A checkpoint is a folder:

    window-00000120/
        state.pt            tensors and plain values, read back with weights_only=True
        shard-*.safetensors the shards of all ranks, where the model is sharded (FSDP2)
        checksums.json      the SHA-256 of every file

It is written under another name, flushed to the disk, and only then renamed: under a checkpoint's
name there is a whole checkpoint or none. The last two are kept. Before one is loaded, every byte is
compared with its checksum; a damaged one is reported, and the one before it is used. Nothing in it
is a pickle that could run code. Shards are written and read by torch's distributed checkpoint, so
that a run may continue on another number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from wholebatch import __version__
from wholebatch.cli.parallel_ranks import World
from wholebatch.cli.safe_loading import load_tensors
from wholebatch.errors import MissingExtraError, StateError, UnsupportedError
from wholebatch.plain_files import folder_to_disk, load_json, open_file, reason, to_disk

_NAME = re.compile(r"window-(\d{8,})")
_STATE, _CHECKSUMS = "state.pt", "checksums.json"
_FORMAT = 3
_SHARD = "sharded tensor"


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was read, and why newer ones could not be."""

    path: Path
    state: dict[str, Any]
    damaged: tuple[tuple[Path, str], ...] = ()


class Checkpoints:
    """The checkpoints of one run. All ranks call `save` and `load` together."""

    def __init__(self, folder: Path, world: World, *, keep: int = 2) -> None:
        self.folder = folder
        self._world = world
        self._keep = keep

    def paths(self) -> list[Path]:
        """Return the checkpoints, oldest first; loading one shows if it is whole."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))

    def save(self, state: Mapping[str, Any], *, windows: int) -> Path:
        """Write one, whole or not at all, and remove those before the last two.

        Sharded tensors in `state` are written by every rank, the rest by the first.
        """
        path, world = self.folder / f"window-{windows:08d}", self._world
        writing = path.with_suffix(".writing")
        plain, shards = _without_shards(state)

        def begin() -> None:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)
            with (writing / _STATE).open("wb") as file:
                torch.save({"format": _FORMAT, "wholebatch": __version__, **plain}, file)

        def publish() -> None:
            files = sorted(writing.iterdir())
            sums = {file.name: _checksum(file, flush=True) for file in files}
            with (writing / _CHECKSUMS).open("w", encoding="utf-8") as file:
                json.dump(sums, file)
                file.flush()
                to_disk(file.fileno())
            folder_to_disk(writing)
            if path.exists():  # of this very window
                _remove(path)
            writing.replace(path)
            folder_to_disk(self.folder)

        try:
            world.on_first_rank(begin)
            if shards:
                world.together(lambda: _write_shards(writing, shards))
            world.on_first_rank(publish)
        except (OSError, RuntimeError) as error:  # torch hides a full disk in a RuntimeError
            why = reason(error.__context__ if isinstance(error.__context__, OSError) else error)
            with suppress(OSError):
                shutil.rmtree(writing)
            last = self.paths()
            kept = f"; the last good one is {last[-1]}" if last else ""
            raise StateError(f"cannot write checkpoint {path}: {why}{kept}") from error
        if world.is_first:
            for old in self.paths()[: -self._keep]:
                with suppress(OSError):  # one too many takes room, and harms nothing else
                    _remove(old)
        return path

    def load(self) -> Loaded | None:
        """Return the newest whole checkpoint, on the CPU; None if there is none at all.

        Its sharded tensors are read by `fill_shards`. A StateError says that all are damaged.
        """
        damaged: list[tuple[Path, str]] = []
        for path in reversed(self._world.on_first_rank(self.paths)):
            why = self._problem_of(path)
            if why is None:
                state = load_tensors(path / _STATE)
                _check_format(state, path)
                return Loaded(path, state, tuple(damaged))
            damaged.append((path, why))
        if not damaged:
            return None
        also = f" (and {len(damaged) - 1} older, damaged too)" if len(damaged) > 1 else ""
        raise StateError(f"{damaged[0][1]}{also}; there is no earlier checkpoint")

    def _problem_of(self, path: Path) -> str | None:
        """Return why a checkpoint cannot be loaded, the same on all ranks; None if it is whole.

        The ranks share the reading: each compares some of the files with their checksums.
        """
        world, why = self._world, None
        try:
            sums = load_json(path / _CHECKSUMS, StateError, path / _CHECKSUMS)
            if not isinstance(sums, dict) or _STATE not in sums:
                raise StateError(f"{path / _CHECKSUMS} does not list its files")
            for name, expected in sorted(sums.items())[world.rank :: world.ranks]:
                if _checksum(path / Path(name).name) != expected:
                    raise StateError(f"the checksum of {name} is wrong")
            if world.is_first:
                load_tensors(path / _STATE)
        except OSError as error:
            why = f"{path} is damaged: {reason(error)} ({Path(error.filename or path).name})"
        except StateError as error:
            why = f"{path} is damaged: {error}"
        return next(filter(None, world.gathered(why)), None)

    def clean(self, loaded: Loaded | None) -> None:
        """Remove what a killed process left half written; rename what is damaged."""
        for path in self.folder.glob("window-*.*ing"):
            shutil.rmtree(path, ignore_errors=True)
        for path, _ in loaded.damaged if loaded is not None else ():
            names = (path.with_suffix(f".damaged{more}") for more in ("", *range(2, 10**6)))
            try:
                path.replace(next(name for name in names if not name.exists()))
            except OSError as error:
                raise StateError(f"cannot rename {path}: {reason(error)}") from error


def _check_format(state: Any, path: Path) -> None:
    """Refuse a whole checkpoint that another version has written."""
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        other = state.get("wholebatch", "an earlier one") if isinstance(state, dict) else "another"
        raise StateError(
            f"{path} was written by another version of wholebatch ({other}); this is "
            f"{__version__}: continue the run with that version, or begin a new one in another "
            "--out"
        )


def _remove(path: Path) -> None:
    """Remove a checkpoint. It loses its name first: an interrupted removal leaves none half."""
    aside = path.with_suffix(".removing")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(path.replace(aside), ignore_errors=True)


def fill_shards(state: Any, path: Path, like: Callable[[tuple[Any, ...]], Tensor | None]) -> Any:
    """Return the state with its sharded tensors read from the files of all ranks.

    `like(place)` gives the tensor whose layout a saved one is to have: a DTensor, or a whole one.
    None is a whole one on the CPU. A whole tensor is sharded where its layout is a DTensor.
    """
    wanted: dict[str, Tensor] = {}

    def filled_in(value: Any, place: tuple[Any, ...]) -> Any:
        if isinstance(value, dict) and value.get("kind") == _SHARD:
            tensor, shape = like(place), value["shape"]
            if tensor is None or list(tensor.shape) != shape:  # of another model: a whole tensor
                tensor = torch.empty(shape)
            wanted[value["name"]] = torch.empty_like(tensor, dtype=value["dtype"]).detach()
            return wanted[value["name"]]
        if isinstance(value, dict):
            return {key: filled_in(item, (*place, key)) for key, item in value.items()}
        layout = like(place) if isinstance(value, Tensor) else None
        if not isinstance(layout, DTensor) or layout.shape != value.shape:
            return value
        mesh, placements = layout.device_mesh, layout.placements
        whole = value.to(mesh.device_type)
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)

    filled = filled_in(state, ())
    if wanted:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = _hugging_face("Reader")(str(path))
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process
                load(wanted, storage_reader=reader)
        except (Exception, CheckpointException) as error:  # files made to mislead
            raise StateError(f"{path} is damaged: {reason(error)}") from None
    return filled


def _write_shards(folder: Path, shards: dict[str, Tensor]) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = _hugging_face("Writer")(str(folder), save_distributed=True)
    save(shards, storage_writer=writer)


def _hugging_face(kind: str) -> Any:
    """Return torch's reader or writer of safetensors files, which hold no pickle."""
    import torch.distributed.checkpoint as dcp

    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise MissingExtraError("safetensors", "fsdp", "a checkpoint of --parallel fsdp2") from None
    if not hasattr(dcp, f"HuggingFaceStorage{kind}"):
        raise UnsupportedError("a checkpoint of --parallel fsdp2 needs torch 2.9 or newer")
    return getattr(dcp, f"HuggingFaceStorage{kind}")


def _without_shards(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the state as plain values, with placeholders for sharded tensors, and those."""
    shards: dict[str, Tensor] = {}

    def plain(value: Any, place: str) -> Any:
        if isinstance(value, DTensor):
            shards[place] = value.detach()
            about = {"name": place, "shape": list(value.shape), "dtype": value.dtype}
            return {"kind": _SHARD, **about}
        if isinstance(value, Tensor):
            return value.detach()
        if isinstance(value, Mapping):
            return {key: plain(item, f"{place}.{key}") for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = [plain(item, f"{place}.{index}") for index, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        if type(value).__module__ == "numpy" and callable(getattr(value, "item", None)):
            return value.item() if getattr(value, "ndim", 0) == 0 else torch.as_tensor(value)
        if value is None or isinstance(
            value, bool | int | float | str | bytes | torch.dtype | torch.device
        ):
            return value
        raise StateError(
            f"cannot checkpoint {place.lstrip('.')}: it is a {type(value).__name__}, and a "
            "checkpoint holds tensors, numbers, strings, and lists, tuples and dicts of them"
        )

    return {key: plain(value, key) for key, value in state.items()}, shards


def _checksum(path: Path, *, flush: bool = False) -> str:
    """Return the SHA-256 of a file; with `flush`, wait until it is on the disk."""
    digest = hashlib.sha256()
    with open_file(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
        if flush:
            to_disk(file.fileno())
    return digest.hexdigest()
