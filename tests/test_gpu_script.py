"""scripts/gpu.py runs GPU tests the same way with and without pytest."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "gpu.py"

GOOD_AND_BAD = """
import unittest
import warnings


def test_passes():
    assert 1 + 1 == 2


def test_fails():
    raise ArithmeticError("off by 38%")


def test_warns():
    warnings.warn("a warning is an error")


def test_skips():
    raise unittest.SkipTest("needs two devices")


def helper():
    raise RuntimeError("not a test")
"""


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_without_pytest(gpu: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(GOOD_AND_BAD, encoding="utf-8")
    (tmp_path / "test_broken.py").write_text("import no_such_module\n", encoding="utf-8")
    (tmp_path / "test_fixture.py").write_text("def test_x(tmp_path): pass\n", encoding="utf-8")
    results = {result.name: result for result in gpu.run_without_pytest(tmp_path)}
    assert {name: result.outcome for name, result in results.items()} == {
        "test_broken.py": "failed",
        "test_fixture.py::test_x": "failed",
        "test_some.py::test_passes": "passed",
        "test_some.py::test_fails": "failed",
        "test_some.py::test_warns": "failed",
        "test_some.py::test_skips": "skipped",
    }
    assert results["test_some.py::test_fails"].reason == "ArithmeticError: off by 38%"
    assert "no_such_module" in results["test_broken.py"].reason
    assert "GPU tests take none" in results["test_fixture.py::test_x"].reason


def test_side_by_side(gpu: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(GOOD_AND_BAD, encoding="utf-8")
    (tmp_path / "test_ends.py").write_text("import os\nos._exit(3)\n", encoding="utf-8")
    results = gpu.run_side_by_side(tmp_path, 2)
    alone = gpu.run_without_pytest(tmp_path / "test_some.py")
    ended, *others = results
    assert (ended.name, ended.outcome) == ("test_ends.py", "failed")
    assert ended.reason == "the process ended with 3"
    assert [(r.name, r.outcome) for r in others] == [(r.name, r.outcome) for r in alone]


def test_with_pytest_gives_the_same_outcomes(tmp_path: Path) -> None:
    """In a process of its own: a pytest inside this one would share its plugins."""
    marked = "import pytest\npytestmark = pytest.mark.gpu\n" + GOOD_AND_BAD
    (tmp_path / "test_some.py").write_text(marked, encoding="utf-8")
    (tmp_path / "conftest.py").write_text(
        'def pytest_configure(config):\n    config.addinivalue_line("markers", "gpu: x")\n',
        encoding="utf-8",
    )
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import gpu, pathlib\n"
        f"for r in gpu.run_with_pytest(pathlib.Path({str(tmp_path)!r})):\n"
        "    print('RESULT', r.name.split('::')[-1], r.outcome, r.reason)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [line.split(maxsplit=3) for line in done.stdout.splitlines() if "RESULT" in line]
    assert {line[1]: line[2] for line in lines} == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_warns": "failed",
        "test_skips": "skipped",
    }, done.stdout
    reasons = {line[1]: line[3] for line in lines if len(line) > 3}
    assert reasons["test_fails"] == "ArithmeticError: off by 38%"
    assert "needs two devices" in reasons["test_skips"]


def test_page_counts_and_escapes(gpu: ModuleType) -> None:
    results = [gpu.Result("a::b", "failed", 1.5, "x | y"), gpu.Result("a::c", "passed", 0.25)]
    page = gpu.table(results, machine="NVIDIA H200, torch 2.11.0", runner="scripts/gpu.py")
    assert "1 passed, 1 failed, 0 skipped." in page
    assert "| `a::b` | failed | 1.50 | x \\| y |" in page
    assert "NVIDIA H200, torch 2.11.0; run by scripts/gpu.py" in page


def test_gpu_tests_take_no_arguments_and_no_pytest() -> None:
    """What scripts/gpu.py asks of them, found before a GPU is asked."""
    files = sorted((ROOT / "tests" / "gpu").rglob("test_*.py"))
    assert files
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        tests = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        assert tests, file.name
        for test in tests:
            assert not ast.unparse(test.args), f"{file.name}::{test.name}"
            assert not test.decorator_list, f"{file.name}::{test.name}"
        imports = [ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Import)]
        imports += [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        assert not any("pytest" in name for name in imports), file.name


def test_refuses_without_cuda(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "test"])
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert gpu.main() == 2
    assert "torch sees no CUDA device here; nothing was run" in capsys.readouterr().err
