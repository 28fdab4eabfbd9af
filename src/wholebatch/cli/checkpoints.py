"""Checkpoints that survive a kill at any moment. A damaged one is never loaded.

A checkpoint is a folder, `window-00000120/`, with `state.pt` (tensors and plain values, read back
with weights_only=True) and `checksums.json` (its SHA-256).

It is written under another name, flushed to the disk, and only then renamed: under a checkpoint's
name there is a whole checkpoint or none. The last two are kept. A damaged one is never loaded.
Nothing in it is a pickle that could run code.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wholebatch import __version__
from wholebatch.cli.parallel_ranks import World
from wholebatch.errors import StateError
from wholebatch.plain_files import folder_to_disk, load_json, reason, to_disk

_NAME = re.compile(r"window-(\d{8,})")
_STATE, _CHECKSUMS = "state.pt", "checksums.json"
_FORMAT = 3
_KEPT = 2


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was read."""

    path: Path
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run. All ranks call `save` and `load` together."""

    def __init__(self, folder: Path, world: World) -> None:
        self.folder = folder
        self._world = world

    def paths(self) -> list[Path]:
        """Return the checkpoints, oldest first; loading one shows if it is whole."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))

    def save(self, state: Mapping[str, Any], *, windows: int) -> Path:
        """Write one, whole or not at all, and remove those before the last two."""
        path = self.folder / f"window-{windows:08d}"
        self._world.on_first_rank(lambda: self._write(path, state))
        return path

    def _write(self, path: Path, state: Mapping[str, Any]) -> None:
        writing, file = path.with_suffix(".writing"), path.with_suffix(".writing") / _STATE
        try:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)
            plain = {key: _plain(value, key) for key, value in state.items()}
            with file.open("wb") as stream:
                torch.save({"format": _FORMAT, "wholebatch": __version__, **plain}, stream)
            with (writing / _CHECKSUMS).open("w", encoding="utf-8") as stream:
                json.dump({_STATE: _checksum(file, flush=True)}, stream)
                stream.flush()
                to_disk(stream.fileno())
            folder_to_disk(writing)
            if path.exists():  # of this very window
                _remove(path)
            writing.replace(path)
            folder_to_disk(self.folder)
        except (OSError, RuntimeError, StateError) as error:
            shutil.rmtree(writing, ignore_errors=True)
            if isinstance(error, StateError):
                raise
            # torch hides a full disk in a RuntimeError
            why = reason(error.__context__ if isinstance(error.__context__, OSError) else error)
            last = self.paths()
            kept = f"; the last good one is {last[-1]}" if last else ""
            raise StateError(f"cannot write checkpoint {path}: {why}{kept}") from error
        for old in self.paths()[:-_KEPT]:
            with suppress(OSError):  # one too many takes room, and harms nothing else
                _remove(old)

    def load(self) -> Loaded | None:
        """Return the newest checkpoint, on the CPU; None if there is none at all."""
        paths = self._world.on_first_rank(self.paths)
        if not paths:
            return None
        why = self._world.on_first_rank(lambda: _problem_of(paths[-1]))
        if why is not None:
            before = (
                f"remove it to go on from {paths[-2].name}" if len(paths) > 1 else "it is alone"
            )
            raise StateError(f"{paths[-1]} {why}; {before}")
        return Loaded(paths[-1], _state_of(paths[-1]))

    def clean(self) -> None:
        """Remove what a killed process left half written."""
        for path in self.folder.glob("window-*.*ing"):
            shutil.rmtree(path, ignore_errors=True)


def _problem_of(path: Path) -> str | None:
    """Return why a checkpoint cannot be loaded; None if it is whole."""
    try:
        sums = load_json(path / _CHECKSUMS, StateError, _CHECKSUMS)
        if not isinstance(sums, dict) or _checksum(path / _STATE) != sums.get(_STATE):
            return f"is damaged: the checksum of {_STATE} is wrong"
        torch.load(path / _STATE, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # not torch's words: it advises to run the code
        return (
            "is not a checkpoint of wholebatch, or it is unsafe: it needs more than tensors and "
            "plain values. None of its code was run"
        )
    except Exception as error:  # files that were made to mislead fail in any way
        return f"is damaged: {reason(error)}"
    return None


def _state_of(path: Path) -> dict[str, Any]:
    """Return what a whole checkpoint holds; refuse one that another version has written."""
    state = torch.load(path / _STATE, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        other = state.get("wholebatch", "an earlier one") if isinstance(state, dict) else "another"
        raise StateError(
            f"{path} was written by another version of wholebatch ({other}); this is "
            f"{__version__}: continue the run with that version, or begin a new one in another "
            "--out"
        )
    return state


def _remove(path: Path) -> None:
    """Remove a checkpoint. It loses its name first: an interrupted removal leaves none half."""
    aside = path.with_suffix(".removing")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(path.replace(aside), ignore_errors=True)


def _plain(value: Any, place: str) -> Any:
    """Return a part of the state as plain values, which can be read back without a pickle."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item, f"{place}.{index}") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if type(value).__module__ == "numpy" and callable(getattr(value, "item", None)):
        return value.item() if getattr(value, "ndim", 0) == 0 else torch.as_tensor(value)
    if value is None or isinstance(
        value, bool | int | float | str | bytes | torch.dtype | torch.device
    ):
        return value
    raise StateError(
        f"cannot checkpoint {place}: it is a {type(value).__name__}, and a checkpoint holds "
        "tensors, numbers, strings, and lists, tuples and dicts of them"
    )


def _checksum(path: Path, *, flush: bool = False) -> str:
    """Return the SHA-256 of a file; with `flush`, wait until it is on the disk."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
        if flush:
            to_disk(file.fileno())
    return digest.hexdigest()
