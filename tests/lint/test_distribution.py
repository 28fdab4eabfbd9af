"""The linter works under another module name, alone, from its checkout, and quickly."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BAD = ROOT / "tests" / "lint" / "fixtures" / "WB104" / "bad_inner_loop.py"


def run(*command: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"]}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_sources_run_as_wholebatch_lint_alone(tmp_path: Path) -> None:
    """What packaging/lint builds: the same files as a module of their own, without wholebatch."""
    shutil.copytree(ROOT / "src" / "wholebatch" / "lint", tmp_path / "wholebatch_lint")
    done = run(sys.executable, "-m", "wholebatch_lint", str(BAD), path=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "WB104" in done.stdout
    code = "import sys, wholebatch_lint.command_line\n"
    code += "print([m for m in sys.modules if 'wholebatch.' in m])"
    assert run(sys.executable, "-c", code, path=tmp_path).stdout == "[]\n"


def test_package_takes_the_folder_of_the_linter() -> None:
    tomllib = pytest.importorskip("tomllib")
    folder = ROOT / "packaging" / "lint"
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    ((source, module),) = wheel["force-include"].items()
    assert (folder / source).resolve() == ROOT / "src" / "wholebatch" / "lint"
    assert module == "wholebatch_lint"
    assert not any("torch" in d for d in project["project"]["dependencies"])
    version = (folder / project["tool"]["hatch"]["version"]["path"]).resolve()
    assert "__version__" in version.read_text()


def test_hook_runs_from_the_checkout() -> None:
    hooks = (ROOT / ".pre-commit-hooks.yaml").read_text()
    entry = next(line.split()[-1] for line in hooks.splitlines() if "entry:" in line)
    hook = ROOT / entry
    assert os.access(hook, os.X_OK)
    done = run(sys.executable, "-I", str(hook), str(BAD))
    assert done.returncode == 1, done.stderr
    assert "WB104" in done.stdout


def test_four_hundred_files_in_seconds(tmp_path: Path) -> None:
    """A smoke test; benchmarks/lint_speed.py measures 5,000 files."""
    spec = importlib.util.spec_from_file_location("speed", ROOT / "benchmarks" / "lint_speed.py")
    assert spec is not None
    assert spec.loader is not None
    speed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(speed)
    scripts = speed.make_tree(tmp_path, 400, 0.2)
    started = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "wholebatch.lint",
        str(tmp_path),
        "--select",
        "WB109",
        "--format",
        "github",
    ]
    done = run(*command, path=ROOT / "src")
    assert done.returncode == 1, done.stderr
    assert len(done.stdout.splitlines()) == scripts == 80
    assert time.perf_counter() - started < 30
