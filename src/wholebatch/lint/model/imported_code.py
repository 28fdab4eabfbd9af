"""The source of local modules that a file imports: where its model, loss or collator is defined."""

from __future__ import annotations

import ast
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from textwrap import dedent

from .expressions import FunctionNode, walk

_LEVELS_UP = 5
_MAX_BYTES = 500_000
_QUOTES = ('"""', "'''")


@dataclass(frozen=True)
class Definition:
    """A class or function of another module: its text, and the module's path."""

    text: str
    path: str

    def method(self, name: str) -> Definition | None:
        """Return a method of the class, or None."""
        pattern = rf"^    def {re.escape(name)}\(.*(\n(?=     |[ \t]*\)|[ \t]*\n)(?!    \S).*)*"
        found = re.search(pattern, self.text, re.M) if self.text.startswith("class ") else None
        return None if found is None else Definition(dedent(found.group()), self.path)

    def function(self, at: ast.AST) -> FunctionNode | None:
        """Return the parsed function, placed at the call in the file that is read."""
        try:
            node = ast.parse(self.text).body[0]
        except (SyntaxError, ValueError):
            return None
        for inner in ast.walk(node):
            inner.foreign = True  # type: ignore[attr-defined]  # Never to be edited.
            ast.copy_location(inner, at)
        return node if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None


Imports = list[ast.Import | ast.ImportFrom]


def imported(imports: Imports, path: str, name: str) -> Definition | None:
    """Return the definition of a name that a file imports: `helper`, or `module.helper`."""
    head, _, rest = name.partition(".")
    for node in imports:
        level = getattr(node, "level", 0)
        package = getattr(node, "module", None) or ""
        for alias in node.names:
            if alias.name == "*" and not rest:
                found = _defined(path, package, level, head)
            elif (alias.asname or alias.name) != head:
                continue
            elif isinstance(node, ast.Import):
                found = _defined(path, alias.name, 0, rest.partition(".")[0])
            else:
                found = _defined(path, package, level, alias.name)
                if found is None and rest:  # `from package import module`
                    inside = f"{package}.{alias.name}" if package else alias.name
                    found = _defined(path, inside, level, rest.partition(".")[0])
            if found is not None:
                return found
    return None


def is_local(node: ast.Import | ast.ImportFrom, path: str) -> bool:
    """True if an import can lead to a module beside the file, or in a folder above."""
    tops = {(getattr(node, "module", None) or a.name).partition(".")[0] for a in node.names}
    folder = os.path.dirname(os.path.abspath(path))
    return getattr(node, "level", 0) > 0 or any(_is_near(folder, top) for top in tops)


@lru_cache(maxsize=4096)
def _is_near(folder: str, top: str) -> bool:
    starts = [folder, *map(str, Path(folder).parents)][: _LEVELS_UP + 1]
    near = {top, f"{top}.py"}
    return any(near & (_names(start) | _names(os.path.join(start, "src"))) for start in starts)


@lru_cache(maxsize=4096)
def visible(path: str, name: str) -> Definition | None:
    """Return the definition of a name as code of a module sees it: its own, or imported."""
    text = _definition(_read(path), name)
    return Definition(text, path) if text else imported(_imports(path), path, name)


def _definition(source: str, name: str) -> str:
    """Return the class or function of this name out of a module's source, or ""."""
    match = (
        re.search(rf"^(class|def) {re.escape(name)}\b", source, re.M) if name in source else None
    )
    if match is None:
        return ""
    block, end = re.compile(r".*(\n(?=[ \t)#\n]).*)*"), match.end()
    while True:
        end = block.match(source, end).end()  # type: ignore[union-attr]
        open_quotes = [q for q in _QUOTES if source.count(q, match.start(), end) % 2]
        # The lines of a long string may begin at the margin.
        closed = source.find(open_quotes[0], end) if open_quotes else -1
        if closed < 0:
            return source[match.start() : end]
        end = closed + 3


def _defined(path: str, module: str, level: int, name: str, depth: int = 0) -> Definition | None:
    """Return the definition in a module, also through a package's re-export."""
    file = _locate(os.path.dirname(os.path.abspath(path)), module, level)
    if file is None or not name:
        return None
    text = _definition(_read(file), name)
    if text:
        return Definition(text, file)
    for node in _imports(file) if depth < 2 and file.endswith("__init__.py") else ():
        if isinstance(node, ast.ImportFrom) and any(a.name in {name, "*"} for a in node.names):
            found = _defined(file, node.module or "", node.level, name, depth + 1)
            if found is not None:
                return found
    return None


@lru_cache(maxsize=4096)
def _locate(folder: str, module: str, level: int) -> str | None:
    """Return the file of a module, looked for beside the importing file and in folders above."""
    here = Path(folder)
    parts = module.split(".")
    starts = [here.parents[level - 2] if level > 1 else here] if level else [here, *here.parents]
    starts = starts[: _LEVELS_UP + 1]
    for start in starts if level else [f for s in starts for f in (s, s / "src")]:
        stem = start.joinpath(*parts)
        for file in (stem.with_suffix(".py"), stem / "__init__.py") if module else ():
            if file.is_file():
                return str(file)
    return None


@lru_cache(maxsize=512)
def _names(folder: str) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))
    except OSError:
        return frozenset()


@lru_cache(maxsize=512)
def _imports(path: str) -> Imports:
    try:
        nodes = walk(ast.parse(_read(path)))
    except (SyntaxError, ValueError):
        return []
    return [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]


@lru_cache(maxsize=128)
def _read(path: str) -> str:
    try:
        file = Path(path)
        if file.stat().st_size > _MAX_BYTES:
            return ""
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
