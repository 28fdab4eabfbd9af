"""The package: built, installed from files into an empty environment, and run (`make dist`)."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

import wholebatch as wb

ROOT = Path(__file__).parents[2]
OUT = Path(os.environ.get("DIST", ROOT / "dist")).resolve()
WHEEL = OUT / f"wholebatch-{wb.__version__}-py3-none-any.whl"

pytestmark = pytest.mark.timeout(1200)


def run(*command: object, cwd: Path, status: int = 0) -> str:
    """Run a command without this checkout on its path, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [str(part) for part in command],
        cwd=cwd, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == status, ran.stdout + ran.stderr
    return ran.stdout


def environment_with(folder: Path, *packages: object) -> Path:
    """Make an environment with these packages, and return the folder of its programs."""
    venv.create(folder, with_pip=True)
    pip = ("-m", "pip", "install", "-q", "--no-compile", "-c", ROOT / "constraints.txt")
    run(folder / "bin" / "python", *pip, *packages, cwd=folder)
    return folder / "bin"


@pytest.fixture(scope="module", autouse=True)
def built(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Build the source distribution, and the wheel from it."""
    folder = tmp_path_factory.mktemp("build")
    python = environment_with(folder, "build") / "python"
    run(python, "-m", "build", "--outdir", OUT, ROOT, cwd=folder)


def test_the_wheel_holds_what_is_not_python() -> None:
    names = set(ZipFile(WHEEL).namelist())
    inside = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src/wholebatch").rglob("*")
        if path.suffix in (".html", ".md", ".typed")
    }
    assert {"wholebatch/py.typed", "wholebatch/cli/report/page.html"} <= inside <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/"))]


def test_the_package_trains_in_an_empty_environment(tmp_path: Path) -> None:
    programs = environment_with(tmp_path / "environment", f"{WHEEL}[cli]")
    assert (
        run(programs / "wholebatch", "--version", cwd=tmp_path) == f"wholebatch {wb.__version__}\n"
    )
    small = ("--updates", 1, "--batch-size", 4, "--micro-batch", 2, "--out", "run")
    said = run(programs / "wholebatch", "train", "bytes-gpt", *small, cwd=tmp_path)
    assert "update 1/1" in said
    example = (ROOT / "docs/index.md").read_text(encoding="utf-8").split("```python\n")[1]
    (tmp_path / "example.py").write_text(example.split("```")[0], encoding="utf-8")
    printed = run(programs / "python", "-W", "error", "example.py", cwd=tmp_path)
    assert printed.startswith("same update: ")
    assert printed.split()[-2:] == ["100.0", "13"]
