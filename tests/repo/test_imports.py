"""What loading a module may import: torch alone; all else inside the function that uses it.

The layers of the package are in `[tool.importlinter]` of pyproject.toml (`make check`).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"

EAGER = {
    "cli": {"rich"},
    "pytest_plugin.py": {"pytest"},  # which is what loads it
    # An adapter is imported by those who use its library.
    "integrations/accelerate.py": {"accelerate"},
    "integrations/lightning.py": {"lightning"},
    "integrations/transformers": {"accelerate", "transformers"},
    "integrations/keras": {"keras", "numpy"},
    "integrations/jax": {"jax", "optax"},
}
"""What a file, or the files of a folder, may import when they are loaded, besides torch."""


def loaded(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Top-level package and line of each import that loading a module runs."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return
    if isinstance(node, ast.Import):
        yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield str(node.module).partition(".")[0], node.lineno
    for child in ast.iter_child_nodes(node):
        yield from loaded(child)


def violations(package: Path) -> list[str]:
    problems = []
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        allowed = {"torch", "wholebatch", *sys.stdlib_module_names}
        for place, packages in EAGER.items():
            if name == place or name.startswith(f"{place}/"):
                allowed |= packages
        for imported, line in loaded(ast.parse(path.read_text(encoding="utf-8"))):
            if imported not in allowed:
                problems.append(f"{name}:{line}: import {imported} inside the function")
            elif name == "__init__.py" and imported == "wholebatch":
                problems.append(f"{name}:{line}: the root loads its names when they are used")
    return problems


def test_loading_a_module_imports_torch_alone() -> None:
    assert not violations(SRC / "wholebatch")
