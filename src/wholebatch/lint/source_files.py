"""Scripts and notebooks: finding them, and reading each as one text that knows its cells."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import stat
import tokenize
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .lint_settings import Settings

_SUFFIXES = (".py", ".ipynb")
_SKIPPED = {
    ".git", ".hg", ".svn", ".venv", "venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".tox",
    ".pytest_cache", "node_modules", ".ipynb_checkpoints", "site-packages", ".eggs", "build",
    "dist",
}  # fmt: skip

# A size that no training script has. Most of a notebook is pictures, so it may be larger.
_MAX_BYTES = 2_000_000
_MAX_NOTEBOOK_BYTES = 50_000_000

_MAGIC = re.compile(r"^(\s*)([%!?]|\w[\w, ]*=\s*[!%]|[\w.]+\?\??$).*$")


@dataclass(frozen=True)
class Problem:
    """The reason why a file, or a cell of it, could not be read."""

    message: str
    line: int = 1
    column: int = 1
    cell: int | None = None


@dataclass
class Source:
    """One file as text. In a notebook, `cells[i]` is the origin of line `i + 1`: (cell, line)."""

    path: str
    text: str
    cells: list[tuple[int, int]] | None = None
    problems: list[Problem] = field(default_factory=list)

    def place(self, line: int) -> tuple[int | None, int]:
        """Return (cell or None, line within it) for a line of the text."""
        if self.cells is None:
            return None, line
        cell, inside = self.cells[min(max(line, 1), len(self.cells)) - 1]
        return cell, inside


def collect(paths: Iterable[str], settings: Settings) -> list[str]:
    """Return the scripts and notebooks under the paths, sorted, and the files that are named."""
    files: dict[str, None] = {}
    for named in paths:
        path = Path(named)
        if not path.is_dir():
            files[str(path)] = None  # A missing one is reported where it is read.
            continue
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(f for f in folders if f not in _SKIPPED)
            for name in sorted(names):
                file = os.path.join(folder, name)
                if name.endswith(_SUFFIXES) and not settings.excludes(file):
                    files[file] = None
    return list(files)


def read_source(path: str) -> Source:
    """Read a file; report a failure as a problem, never as an exception."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return _unread(path, "is not a regular file: not read")
        is_notebook = path.endswith(".ipynb")
        limit = _MAX_NOTEBOOK_BYTES if is_notebook else _MAX_BYTES
        if status.st_size > limit:
            return _unread(path, f"file is {status.st_size:,} bytes, over the limit of {limit:,}")
        data = Path(path).read_bytes()
        if is_notebook:
            return notebook_source(path, data)
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return Source(path, data.decode(encoding).replace("\r\n", "\n").replace("\r", "\n"))
    except FileNotFoundError:
        return _unread(path, "no such file or folder")
    except (OSError, UnicodeDecodeError, SyntaxError, LookupError) as error:
        return _unread(path, f"cannot be read: {error}")


def _unread(path: str, why: str) -> Source:
    return Source(path, "", problems=[Problem(why)])


def notebook_source(path: str, data: bytes) -> Source:
    """Join the code cells of a notebook into one text."""
    try:
        notebook = json.loads(data.decode("utf-8-sig"))
        cells = notebook["cells"]
        bodies = [
            (number, _joined(cell.get("source", "")))
            for number, cell in enumerate(cells, start=1)
            if cell.get("cell_type") == "code"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return Source(path, "", cells=[(1, 1)], problems=[Problem(f"is not a notebook: {error}")])
    source = Source(path, "", cells=[])
    lines: list[str] = []
    assert source.cells is not None
    for number, body in bodies:
        cleaned = _without_magics(body)
        wrong = _syntax_error(cleaned)
        if wrong is not None:
            source.problems.append(
                Problem(f"syntax error: {wrong.msg}", wrong.lineno or 1, wrong.offset or 1, number)
            )
            cleaned = "\n" * body.count("\n")
        for inside, line in enumerate(cleaned.split("\n"), start=1):
            lines.append(line)
            source.cells.append((number, inside))
    source.text = "\n".join(lines) + "\n"
    source.cells.append(source.cells[-1] if source.cells else (1, 1))
    return source


def _joined(body: object) -> str:
    return "".join(str(part) for part in body) if isinstance(body, list) else str(body)


def _without_magics(body: str) -> str:
    """Replace IPython's own syntax with `pass`, line by line."""
    if body.lstrip().startswith("%%"):
        return "\n" * body.count("\n")
    return "\n".join(_MAGIC.sub(r"\1pass", line) for line in body.split("\n"))


def _syntax_error(body: str) -> SyntaxError | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(body)
    except SyntaxError as error:
        return error
    except ValueError as error:
        return SyntaxError(str(error))
    return None
