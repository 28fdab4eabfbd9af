"""The source of local modules that a file imports: where its model, loss or collator is defined."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

_LEVELS_UP = 5
_MAX_BYTES = 500_000


def module_source(tree: ast.Module, path: str, name: str) -> str:
    """Return the source of the local module that defines an imported name, or ""."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(
            (a.asname or a.name) == name for a in node.names
        ):
            original = next(a.name for a in node.names if (a.asname or a.name) == name)
            return _defining(path, node.module or "", node.level, original)
    return ""


def definition(source: str, name: str) -> str:
    """Return the class or function of this name out of a module's source, or ""."""
    match = re.search(rf"^(class|def) {re.escape(name)}\b.*(\n(?=[ \t)#\n]).*)*", source, re.M)
    return match.group() if match else ""


def _defining(path: str, module: str, level: int, name: str, depth: int = 0) -> str:
    """Return the source of the module that defines the name, through a package's re-export."""
    file = _locate(path, module, level)
    source = "" if file is None else _read(str(file))
    if f"class {name}" in source or f"def {name}" in source or depth > 1 or file is None:
        return source
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(a.name in {name, "*"} for a in node.names):
            found = _defining(str(file), node.module or "", node.level, name, depth + 1)
            if f"class {name}" in found or f"def {name}" in found:
                return found
    return source


def _locate(path: str, module: str, level: int) -> Path | None:
    """Return the file of a module, looked for beside the importing file and in folders above."""
    here = Path(path).resolve().parent
    parts = module.split(".") if module else []
    starts = [here.parents[level - 2] if level > 1 else here] if level else [here, *here.parents]
    for start in starts[: _LEVELS_UP + 1]:
        for file in (
            start.joinpath(*parts).with_suffix(".py"),
            start.joinpath(*parts, "__init__.py"),
        ):
            if parts and file.is_file():
                return file
    return None


@lru_cache(maxsize=128)
def _read(path: str) -> str:
    try:
        file = Path(path)
        if file.stat().st_size > _MAX_BYTES:
            return ""
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
