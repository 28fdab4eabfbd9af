"""Runs what needs CUDA, on a machine whose torch is already there and nothing can be installed.

    python scripts/gpu.py test              # tests/gpu, and a table of the results
    python scripts/gpu.py test --jobs 8     # five tests to a process, the processes side by side
    python scripts/gpu.py test --jobs 8 test_fp8.py
    python scripts/gpu.py bench             # every benchmarks/gpu_*.py
    python scripts/gpu.py bench speed tune  # some of them

GPU tests are plain functions `test_*()` without arguments, in files that do not import pytest: with
pytest installed it runs them, without it this script does. A test that cannot run on this device
raises `unittest.SkipTest`, which both understand.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Result:
    """How one test ended: its name, "passed", "failed" or "skipped", seconds, and why."""

    name: str
    outcome: str
    seconds: float
    reason: str = ""


class Collector:
    """A pytest plugin that keeps the result of every test."""

    def __init__(self) -> None:
        self.results: list[Result] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        # A test's own phase counts; set-up and tear-down only where they fail or skip.
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.removeprefix("tests/gpu/")
            reason = _reason(report.longrepr)
            self.results.append(Result(name, report.outcome, report.duration, reason))

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome != "passed":
            reason = _reason(report.longrepr)
            self.results.append(Result(report.nodeid, report.outcome, 0.0, reason))


def run_with_pytest(folder: Path) -> list[Result]:
    """The results of pytest over `folder`, without the plugins that pyproject.toml asks for."""
    import pytest

    collector = Collector()
    options = [f"--config-file={os.devnull}", f"--rootdir={ROOT}", "--import-mode=importlib"]
    options += ["-p", "no:cacheprovider", "-W", "error", "-v", "-m", "gpu"]
    pytest.main([str(folder), *options], plugins=[collector])
    return collector.results


def run_without_pytest(folder: Path, only: list[str] | None = None) -> list[Result]:
    """The results of every `test_*` function in `folder`, each called by this script."""
    results = []
    for path in sorted(folder.rglob("test_*.py")) if folder.is_dir() else [folder]:
        name = path.name if path == folder else path.relative_to(folder).as_posix()
        try:
            module = _load(path)
        except Exception as problem:
            traceback.print_exc()
            results.append(Result(name, "failed", 0.0, f"cannot be imported: {problem!r}"))
            continue
        for test, function in list(vars(module).items()):
            if (
                test in (only or [test])
                and test.startswith("test_")
                and inspect.isfunction(function)
            ):
                results.append(_call(f"{name}::{test}", function))
                print(f"{results[-1].outcome:8} {results[-1].name}", flush=True)
    return results


def run_side_by_side(folder: Path, jobs: int, names: Sequence[str] = ()) -> list[Result]:
    """The results of every file in `folder`, five tests to a process, `jobs` processes at a time.

    What a test does to its process (a limit of memory, a graph, a process group) stays there; how
    long tests take then says nothing.
    """
    from concurrent.futures import ThreadPoolExecutor

    pieces = []
    for path in sorted(folder.rglob("test_*.py")):
        tests = re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        if path.name in (names or [path.name]):
            pieces += [[str(path), *tests[i : i + 5]] for i in range(0, len(tests) or 1, 5)]
    with tempfile.TemporaryDirectory() as kept, ThreadPoolExecutor(jobs) as pool:
        places = [Path(kept) / f"{number}.json" for number in range(len(pieces))]
        return [one for found in pool.map(_in_a_process, pieces, places) for one in found]


def _in_a_process(piece: list[str], place: Path) -> list[Result]:
    command = [sys.executable, str(Path(__file__)), "one", *piece, "--out", str(place)]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.STDOUT, check=False)
    if not place.exists():
        reason = f"the process ended with {done.returncode}"
        return [Result(Path(piece[0]).name, "failed", 0.0, reason)]
    return [Result(**result) for result in json.loads(place.read_text(encoding="utf-8"))]


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gpu_tests_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module


def _call(name: str, function: Any) -> Result:
    if inspect.signature(function).parameters:
        return Result(name, "failed", 0.0, "takes arguments; GPU tests take none")
    started = time.perf_counter()
    outcome, reason = "passed", ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            function()
    except unittest.SkipTest as skipped:
        outcome, reason = "skipped", str(skipped)
    except Exception as problem:
        traceback.print_exc()
        outcome, reason = "failed", _last_line(f"{type(problem).__name__}: {problem}")
    return Result(name, outcome, time.perf_counter() - started, reason)


def _reason(longrepr: Any) -> str:
    """One line of what pytest knows: (file, line, reason) of a skip, or the crash's message."""
    if isinstance(longrepr, tuple):
        return str(longrepr[2])
    crash = getattr(longrepr, "reprcrash", None)
    return str(crash.message).partition("\n")[0] if crash else _last_line(str(longrepr or ""))


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def table(results: list[Result], *, machine: str, runner: str) -> str:
    """The results as a Markdown page."""
    counts = [
        f"{sum(result.outcome == outcome for result in results)} {outcome}"
        for outcome in ("passed", "failed", "skipped")
    ]
    lines = [
        "# GPU tests",
        "",
        f"Written by `make gpu-test` on {date.today().isoformat()}: {machine}; run by {runner}.",
        f"{', '.join(counts)}.",
        "",
        "| test | outcome | seconds | |",
        "|---|---|---:|---|",
    ]
    for result in results:
        reason = result.reason.replace("|", "\\|")
        lines.append(f"| `{result.name}` | {result.outcome} | {result.seconds:.2f} | {reason} |")
    return "\n".join(lines) + "\n"


def test(out: Path, jobs: int, names: list[str]) -> int:
    """Run tests/gpu, write the table, and say whether all is well."""
    import torch

    if not torch.cuda.is_available():
        print("gpu.py: torch sees no CUDA device here; nothing was run", file=sys.stderr)
        return 2
    folder = ROOT / "tests" / "gpu"
    with_pytest = importlib.util.find_spec("pytest") is not None
    runner = "pytest" if with_pytest else "scripts/gpu.py"
    if jobs > 1 or names:
        results = run_side_by_side(folder, jobs, names)
        runner = f"scripts/gpu.py, {jobs} processes side by side"
    else:
        results = (run_with_pytest if with_pytest else run_without_pytest)(folder)
    if not results:
        print(f"gpu.py: no GPU test was found in {folder}", file=sys.stderr)
        return 2
    python = sys.version.split()[0]
    page = table(
        results,
        machine=f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {python}",
        runner=runner,
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu-tests.md").write_text(page, encoding="utf-8")
    print(page)
    return int(any(result.outcome == "failed" for result in results))


def bench(names: list[str]) -> int:
    """Run the GPU benchmarks, each in a process of its own; they write their own pages."""
    known = {
        path.stem.removeprefix("gpu_"): path for path in (ROOT / "benchmarks").glob("gpu_*.py")
    }
    for name in names:
        if name not in known:
            print(f"gpu.py: bench {name}: must be of {', '.join(sorted(known))}", file=sys.stderr)
            return 2
    scripts = [known[name] for name in names or sorted(known)]
    failed = []
    for script in scripts:
        print(f"== {script.name}", flush=True)
        if subprocess.run([sys.executable, str(script)], cwd=ROOT, check=False).returncode:
            failed.append(script.name)
    print(
        f"{len(scripts) - len(failed)} of {len(scripts)} benchmarks ran", *failed, sep="\nfailed: "
    )
    return int(bool(failed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["test", "bench", "one"])
    parser.add_argument("names", nargs="*", help="only these; one: a file and its tests")
    parser.add_argument("--jobs", type=int, default=1, help="test: processes side by side")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    options = parser.parse_intermixed_args()
    sys.path.insert(0, str(ROOT / "src"))
    # Tests start processes of their own.
    others = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), others])
    if options.what == "test":
        return test(options.out, options.jobs, options.names)
    if options.what == "bench":
        return bench(options.names)
    results = run_without_pytest(Path(options.names[0]), options.names[1:])
    options.out.write_text(json.dumps([asdict(result) for result in results]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
