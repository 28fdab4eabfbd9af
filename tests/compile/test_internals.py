"""The private parts of torch that the engine uses are in this torch, and there are few of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import wholebatch
from tests.compile import torch_internals

HOME = Path(wholebatch.__file__).parent


@pytest.mark.filterwarnings("ignore")
def test_this_torch_has_them() -> None:
    assert torch_internals.missing() == []
    assert sum(1 + len(one.attributes) for one in torch_internals.INTERNALS) <= 50
    assert len(torch_internals.WINDOW_INTERNALS) <= 15
    assert len(torch_internals.TEST_AND_MEMORY_INTERNALS) <= 12
    assert len(torch_internals.VERIFICATION_INTERNALS) <= 8


# A named tuple's, Python's, DeepSpeed's, Transformers', PEFT's (a cache that DoRA clears).
OTHERS = {
    "_fields",
    "_getframe",
    "_make",
    "_replace",
    "_config",
    "_param_dict",
    "_can_checkpoint_with_cache",
}
OTHERS |= {"_cache_clear", "_can_use_grouped_mm"}


@pytest.mark.parametrize(
    ("folders", "internals"),
    [
        (["compile", "offload"], torch_internals.INTERNALS),
        (["window", "distributed", "batch", "losses", "."], torch_internals.WINDOW_INTERNALS),
        (["coupled", "coupled/batchnorm", "memory"], torch_internals.TEST_AND_MEMORY_INTERNALS),
        (["verification"], torch_internals.VERIFICATION_INTERNALS),
    ],
)
def test_every_private_name_of_torch_is_listed(
    folders: list[str], internals: tuple[torch_internals.Internal, ...]
) -> None:
    trees = {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for folder in folders
        for path in (HOME / folder).glob("*.py")
    }
    nodes = [(path.name, node) for path, tree in trees.items() for node in ast.walk(tree)]
    ours = {name for _, node in nodes for name in _defined(node)}
    known = {name for one in internals for name in one.attributes} | OTHERS
    for one in internals:
        known |= {*one.module.split("."), *one.name.split(".")}
    used = {(file, name) for file, node in nodes for name in _used(node) if name not in ours}
    assert {one for one in used if one[1] not in known} == set()


def _defined(node: ast.AST) -> list[str]:
    """The names that the engine's own code defines here."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [node.attr] if ast.unparse(node.value) == "self" else []
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [one.id for one in targets if isinstance(one, ast.Name)]


def _used(node: ast.AST) -> list[str]:
    """The private names that are read, imported, replaced or asked for here."""
    names: list[str] = []
    if isinstance(node, ast.Attribute) and not ast.unparse(node.value).endswith("aten"):
        names = [node.attr]
    elif isinstance(node, ast.keyword):
        names = [node.arg or ""]
    elif isinstance(node, ast.ImportFrom):
        names = [*(node.module or "").split("."), *(one.name for one in node.names)]
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
        names = [one.value for one in node.args if isinstance(one, ast.Constant)]
    return [name for name in names if re.fullmatch(r"_[a-z]\w*", str(name))]
