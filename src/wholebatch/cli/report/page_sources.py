"""The sources of a page, read from files that commands wrote: runs, plans, verdicts, tunings.

A folder is a run of `wholebatch train` (`config.json`, `metrics.jsonl`), with optional
`verify.json`, `plan.json` and `tune.json`. A file comes from `wholebatch verify --json`,
`wholebatch plan --json`, `wholebatch tune` or a benchmark; its content shows which.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wholebatch.errors import StateError
from wholebatch.plain_files import load_json, open_file, reason

Data = dict[str, Any]


@dataclass(frozen=True)
class TrainingRun:
    """One training run: its configuration, and one record for every window."""

    name: str
    path: Path
    config: Data
    records: list[Data]
    manifest: Data = field(default_factory=dict)

    @property
    def settings(self) -> Data:
        found: Data = self.config.get("settings", {})
        return found


@dataclass(frozen=True)
class Sources:
    """Everything that was given, by kind; all but runs as (name, data)."""

    runs: list[TrainingRun] = field(default_factory=list)
    plans: list[tuple[str, Data]] = field(default_factory=list)
    tunes: list[tuple[str, Data]] = field(default_factory=list)
    verdicts: list[tuple[str, Data]] = field(default_factory=list)
    benchmarks: list[tuple[str, Data]] = field(default_factory=list)
    curves: list[tuple[str, Data]] = field(default_factory=list)

    def add(self, kind: str, name: str, data: Data) -> None:
        """Add the content of a file to its kind."""
        getattr(self, f"{kind}s").append((name, data))


def read_sources(paths: Sequence[Path]) -> Sources:
    """Read every path; raise a StateError for the first that a page cannot show."""
    sources = Sources()
    names = _names(paths)
    for path, name in zip(paths, names, strict=True):
        if path.is_dir():
            _read_folder(path, name, sources)
        elif os.path.lexists(path):
            data = load_json(path, StateError, path)
            sources.add(_known(path, data), name, data)
        else:
            raise StateError(f"{path}: there is no such run or file")
    return sources


def kind_of(data: object) -> str | None:
    """Return the kind of a JSON file: plan, tune, verdict, curve or benchmark; None for others.

    >>> kind_of({"same": True, "line": "same update: ..."}), kind_of([1, 2])
    ('verdict', None)
    """
    if not isinstance(data, dict):
        return None
    if "trials" in data and "settings" in data:
        return "tune"
    if isinstance(data.get("same"), bool) and "line" in data:
        return "verdict"
    if "points" in data and "budget" in data:
        return "plan"
    if isinstance(data.get("curves"), list):
        return "curve"
    if isinstance(data.get("rows"), list) or isinstance(data.get("results"), dict):
        return "benchmark"
    return None


def _known(path: Path, data: object) -> str:
    kind = kind_of(data)
    if kind is None:
        beside = f"; give {path.parent}" if (path.parent / "config.json").is_file() else ""
        raise StateError(
            f"{path}: is not what `wholebatch plan --json`, `verify --json`, `tune` or a benchmark "
            f"writes, nor the folder of a run{beside}"
        )
    return kind


def _read_folder(path: Path, name: str, sources: Sources) -> None:
    if not os.path.lexists(path / "config.json"):
        raise StateError(f"{path}: there is no run in this folder (it has no config.json)")
    config = load_json(path / "config.json", StateError, path / "config.json")
    if not isinstance(config, dict) or not isinstance(config.get("settings"), dict):
        raise StateError(f"{path / 'config.json'}: does not hold the settings of a run")
    manifest = path / "manifest.json"
    known = load_json(manifest, StateError, manifest) if manifest.is_file() else {}
    records = _records(path / "metrics.jsonl")
    sources.runs.append(
        TrainingRun(name, path, config, records, known if isinstance(known, dict) else {})
    )
    for other in (path / "verify.json", path / "plan.json", path / "tune.json"):
        if other.is_file():
            data = load_json(other, StateError, other)
            sources.add(_known(other, data), name, data)


def _records(path: Path) -> list[Data]:
    """Return the complete lines: an active run may still be writing the last one."""
    if not path.is_file():
        return []
    records = []
    try:
        with open_file(path) as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {reason(error)}") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict) or not isinstance(record.get("window"), int):
            raise StateError(f"{path}, line {number}: is not the record of a window")
        records.append(record)
    if len(lines) > 1 and not records:
        raise StateError(f"{path}: none of its {len(lines)} lines is the record of a window")
    return records


def _names(paths: Sequence[Path]) -> list[str]:
    """Return short, distinct names of the paths: the last part, else with its parent, else all."""
    absolute = [path.resolve() for path in paths]
    stems = [path.name if path.is_dir() else path.stem for path in absolute]
    longer = [f"{path.parent.name}/{stem}" for path, stem in zip(absolute, stems, strict=True)]
    result = []
    for at, stem in enumerate(stems):
        if stems.count(stem) == 1:
            result.append(stem)
        else:
            result.append(longer[at] if longer.count(longer[at]) == 1 else str(absolute[at]))
    return result
