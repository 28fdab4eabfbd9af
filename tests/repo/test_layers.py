"""Imports go downwards only: the module map of docs/architecture.md, held by reading the sources.

Nothing is imported here. Each file is parsed, each of its imports (at any depth, absolute or
relative, under `if TYPE_CHECKING:` too) is traced to a unit of `LAYERS`, and must lie on a lower
layer, in the same unit, or be a sideways import that `SIDEWAYS` names.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "wholebatch"

# Top to bottom. A unit is a package, or a module beside the packages. Packages import downwards
# only, also for types: a circle between packages cannot be read from one end to the other.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"__main__"}),
    frozenset({"cli"}),
    frozenset({"integrations", "lint", "testing", "tune"}),
    frozenset({"verification"}),
    frozenset({"accumulator", "whole_batch", "distributed.pipeline"}),
    frozenset({"batch_windows", "loop_windows"}),
    frozenset({"loop", "run_loss", "two_pass_runner"}),
    frozenset({"runner"}),
    frozenset({"joint_windows", "loss_functions", "make_ledger"}),
    frozenset({"memory"}),
    frozenset({"checks"}),
    frozenset({"coupled"}),
    frozenset({"compile"}),
    frozenset({"options"}),
    frozenset({"offload", "batch"}),
    frozenset({"window"}),
    frozenset({"distributed"}),
    frozenset({"losses"}),
    frozenset({"gpus", "optional_packages", "plain_files", "readable_sizes", "warn_user"}),
    frozenset({"errors"}),
)
# Allowed between two units of one layer: (importer, imported).
SIDEWAYS: frozenset[tuple[str, str]] = frozenset({("testing", "verification")})
# `import wholebatch as wb` reaches every export, up to WholeBatch.
ROOT_UNIT = "whole_batch"

# Packages that may be imported when a module is loaded; every other one only inside the function
# that uses it. Torch is the core's one dependency, and `lint` must not reach even that.
EAGER: dict[str, frozenset[str]] = {
    "cli": frozenset({"rich"}),
    "compile.triton_kernels": frozenset({"triton"}),  # comes with torch's CUDA builds
}
# An adapter is imported by those who use its library: it imports that when it is loaded.
HOSTS: dict[str, frozenset[str]] = {
    "accelerate": frozenset({"accelerate"}),
    "lightning": frozenset({"lightning"}),
    "transformers": frozenset({"accelerate", "transformers"}),
    "keras": frozenset({"keras", "numpy"}),
    "jax": frozenset({"jax", "optax"}),
}
# Modules of `integrations` that several adapters use.
SHARED = (["handed_over"],)
WITHOUT_TORCH = ("lint",)


@dataclass(frozen=True)
class Import:
    """One import: where, of what, whether loading the module runs it, whether it is for types."""

    module: str
    line: int
    target: str
    eager: bool
    for_types: bool = False


def modules_of(src: Path) -> dict[str, Path]:
    """Dotted name -> file, for every module under `src`."""
    found = {}
    for path in sorted(src.rglob("*.py")):
        parts = path.relative_to(src).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def exported_homes(path: Path) -> dict[str, str]:
    """Name -> submodule, by the table `_NAMES` of the package, read without importing it."""
    if not path.exists():
        return {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_NAMES":
            table: dict[str, str] = ast.literal_eval(node.value)
            return {name: home for home, names in table.items() for name in names.split()}
    return {}


def imports_of(module: str, path: Path, modules: dict[str, Path]) -> list[Import]:
    """Every import that the module can run, with relative names made absolute."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: list[Import] = []

    def visit(node: ast.AST, eager: bool, types: bool = False) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for child in node.body if module != PACKAGE else ():  # the root's table has no layer
                visit(child, False, True)
            return
        if isinstance(node, ast.Import):
            found.extend(Import(module, node.lineno, one.name, eager, types) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                # `from package import name`: a submodule, a name the root exports, or a plain name.
                known = full in modules or base == PACKAGE
                found.append(Import(module, node.lineno, full if known else base, eager, types))
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, eager and not inside, types)

    visit(ast.parse(path.read_text(encoding="utf-8"), filename=str(path)), True)
    return found


def unit_of(module: str) -> str | None:
    """The unit of `LAYERS` that a dotted name without the package's own belongs to."""
    parts = module.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((name for name in names if any(name in layer for layer in LAYERS)), None)


def depth_of(unit: str) -> int:
    return next(depth for depth, layer in enumerate(LAYERS) if unit in layer)


def may_import_sideways(unit: str, other: str) -> bool:
    same_package = unit.partition(".")[0] == other.partition(".")[0]
    return same_package or (unit, other) in SIDEWAYS


def internal_target(imported: Import, homes: dict[str, str]) -> str | None:
    """The module inside the package that an import reaches; None if it is not ours to judge."""
    if imported.target == PACKAGE:
        return ROOT_UNIT
    if not imported.target.startswith(f"{PACKAGE}."):
        return None
    inner = imported.target.removeprefix(f"{PACKAGE}.")
    if inner.startswith("__"):  # __version__ and the like live in the root itself
        return None
    return homes.get(inner, inner)


def violations(src: Path) -> list[str]:
    """One line for every import that breaks a rule; empty when the tree keeps them all."""
    modules = modules_of(src)
    homes = exported_homes(src / PACKAGE / "__init__.py")
    every = [found for name, path in modules.items() for found in imports_of(name, path, modules)]
    problems: list[str] = []

    for name in modules:
        if name != PACKAGE and unit_of(name.removeprefix(f"{PACKAGE}.")) is None:
            problems.append(f"{name}: unknown; place it in LAYERS of tests/repo/test_layers.py")

    reached: dict[str, set[str]] = {}
    named: dict[str, set[str]] = {}  # for types too
    for found in every:
        where = f"{found.module}:{found.line}"
        top = found.target.partition(".")[0]
        target = internal_target(found, homes)
        if found.module == PACKAGE:
            if target is not None:
                problems.append(f"{where}: the root loads names when used, not {found.target}")
            continue
        unit = unit_of(found.module.removeprefix(f"{PACKAGE}."))
        name = found.target if target is None else f"{PACKAGE}.{target}"
        named.setdefault(found.module, set()).add(name)
        if not found.for_types:
            reached.setdefault(found.module, set()).add(name)
        if unit is None:
            continue
        if target is None:
            inner = found.module.removeprefix(f"{PACKAGE}.")
            allowed = {"torch", PACKAGE, *EAGER.get(unit, ()), *EAGER.get(inner, ())}
            if unit == "integrations":
                allowed |= HOSTS.get([*found.module.split("."), ""][2], frozenset())
            if found.eager and top not in sys.stdlib_module_names and top not in allowed:
                problems.append(f"{where}: import {top} inside the function that uses it")
            continue
        other = unit_of(target)
        if other is None:
            problems.append(f"{where}: {found.target} is unknown; place it in LAYERS")
        elif depth_of(other) < depth_of(unit):
            problems.append(f"{where}: {unit} imports upwards from {other}")
        elif depth_of(other) == depth_of(unit) and not may_import_sideways(unit, other):
            problems.append(f"{where}: {unit} imports sideways from {other}")
        elif other == unit == "integrations":
            mine, theirs = found.module.split(".")[2:3], target.split(".")[1:2]
            if mine and theirs and mine != theirs and theirs not in SHARED:
                problems.append(f"{where}: an integration imports no other integration")

    problems.extend(circles(modules, named))
    for unit in WITHOUT_TORCH:
        problems.extend(paths_to_torch(unit, reached))
    return list(dict.fromkeys(problems))


def circles(modules: dict[str, Path], reached: dict[str, set[str]]) -> list[str]:
    """One line if modules import each other in a circle, at whatever depth, for types too."""

    def module_of(target: str) -> str:
        while target not in modules:
            target = target.rpartition(".")[0]
        return target

    inside = {
        name: {module_of(to) for to in targets if to.startswith(f"{PACKAGE}.")} - {name, PACKAGE}
        for name, targets in reached.items()
    }
    try:
        TopologicalSorter(inside).prepare()
    except CycleError as error:
        return [f"{' -> '.join(reversed(error.args[1]))}: a circle of imports"]
    return []


def paths_to_torch(unit: str, reached: dict[str, set[str]]) -> list[str]:
    """How modules of `unit` reach torch, directly or through others of the package."""
    problems = []
    start = [name for name in reached if unit_of(name.removeprefix(f"{PACKAGE}.")) == unit]
    paths = {name: [name] for name in start}
    queue = list(start)
    while queue:
        name = queue.pop()
        for target in sorted(reached.get(name, ())):
            if target.partition(".")[0] == "torch":
                problems.append(f"{' -> '.join(paths[name])} -> {target}: {unit} never needs torch")
            elif target not in paths:
                paths[target] = [*paths[name], target]
                queue.append(target)
    return problems


def test_imports_go_downwards_only() -> None:
    found = violations(ROOT / "src")
    assert not found, "\n".join(["", *found])


NAMES_TABLE = '_NAMES = {"whole_batch": "WholeBatch", "losses.loss": "Loss"}\n'
PLANTED = {
    "upwards": (
        "losses/loss.py",
        "def f():\n    from wholebatch import tune\n",
        "upwards",
    ),
    "relative": (
        "coupled/a.py",
        "from ..whole_batch import WholeBatch\n",
        "upwards from whole_batch",
    ),
    "export": (
        "coupled/a.py",
        "from wholebatch import WholeBatch\n",
        "upwards from whole_batch",
    ),
    "root": ("window/window.py", "import wholebatch as wb\n", "upwards from whole_batch"),
    "type": (
        "coupled/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from wholebatch import runner\n",
        "coupled imports upwards from runner",
    ),
    "sideways": (
        "accumulator.py",
        "from wholebatch import whole_batch\n",
        "accumulator imports sideways",
    ),
    "another integration": (
        "integrations/jax.py",
        "from wholebatch.integrations import keras\n",
        "an integration imports no other integration",
    ),
    "framework": (
        "cli/report/terminal_output.py",
        "try:\n    import wandb\nexcept ImportError:\n    pass\n",
        "wandb",
    ),
    "lint and torch": ("lint/rule.py", "def f():\n    import torch.nn\n", "lint never needs torch"),
    "lint through loss": (
        "lint/rule.py",
        "from ..losses.loss import Loss\n",
        "-> wholebatch.losses.loss -> torch",
    ),
    "circle": ("memory/other.py", "from . import choose\n", "a circle of imports"),
    "circle of types": (
        "memory/other.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import choose\n",
        "a circle of imports",
    ),
    "unknown": ("surprise.py", "", "place it in LAYERS"),
    "eager root": (
        "__init__.py",
        f"from .losses.loss import Loss\n{NAMES_TABLE}",
        "the root loads names when used",
    ),
}


def plant(src: Path, name: str, text: str) -> None:
    path = src / PACKAGE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree that keeps every rule."""
    plant(tmp_path, "__init__.py", NAMES_TABLE)
    plant(tmp_path, "errors.py", "")
    plant(tmp_path, "losses/__init__.py", "")
    plant(tmp_path, "window/__init__.py", "")
    plant(tmp_path, "runner.py", "")
    plant(tmp_path, "losses/loss.py", "import torch\nfrom wholebatch import errors\n")
    plant(tmp_path, "window/window.py", "from wholebatch.losses.loss import Loss\n")
    plant(tmp_path, "accumulator.py", "from wholebatch.window.ledger import Ledger\n")
    plant(
        tmp_path,
        "whole_batch.py",
        "from typing import TYPE_CHECKING\nfrom wholebatch import Loss, __version__\n"
        "if TYPE_CHECKING:\n    from wholebatch.runner import Runner\n",
    )
    plant(tmp_path, "memory/__init__.py", "from .choose import best\n")
    plant(tmp_path, "memory/choose.py", "from . import meter\nfrom . import other\n")
    plant(tmp_path, "memory/meter.py", "")
    plant(tmp_path, "memory/other.py", "")
    plant(tmp_path, "memory/budget.py", "")
    plant(tmp_path, "integrations/__init__.py", "")
    plant(tmp_path, "integrations/keras.py", "def f():\n    import keras\n")
    plant(tmp_path, "tune.py", "")
    plant(tmp_path, "cli/__init__.py", "import rich\nimport wholebatch as wb\n")
    return tmp_path


def test_checker_is_silent_on_a_good_tree(tree: Path) -> None:
    assert violations(tree) == []


@pytest.mark.parametrize("name", PLANTED)
def test_checker_catches(tree: Path, name: str) -> None:
    where, text, expected = PLANTED[name]
    plant(tree, where, text)
    found = violations(tree)
    assert len(found) == 1, found
    assert expected in found[0]
