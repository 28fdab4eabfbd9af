"""What all tests share: a fixed seed, GPU tests that wait for a GPU, `--cpu-times`."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

GPU_TESTS = Path(__file__).parent / "gpu"
# JAX compiles its programs, which is most of what it does here, in half the time.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"

try:
    import hypothesis
except ImportError:  # a machine where nothing can be installed runs tests/gpu without it
    pass
else:
    # No deadline: the first example of a test pays for torch's warm-up. Derandomized: what failed
    # once fails again, on every machine.
    hypothesis.settings.register_profile("wholebatch", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("wholebatch")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-times",
        metavar="FILE",
        help="append the processor seconds of every test to FILE (Linux): other work on the "
        "machine does not change them, as it does --durations",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """With --cpu-times, measure each test with its fixtures and the processes it started."""
    path = item.config.getoption("--cpu-times")
    if path is None:
        return (yield)
    before = processor_seconds()
    result = yield
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{processor_seconds() - before:8.2f}  {item.nodeid}\n")
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which packages were missing, and how to install them."""
    if missing := missing_packages(terminalreporter):
        terminalreporter.section("left out", sep="=")
        terminalreporter.line(f"tests that need {missing}: pip install '.[dev-all]'")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where EVERY_TEST is set, as `make test` does, and a package was missing."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("EVERY_TEST") and reporter is not None and missing_packages(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def missing_packages(reporter: pytest.TerminalReporter) -> str:
    """Return the packages that skipped tests did not find, by the reports of a session."""
    reasons = " ".join(str(report.longrepr) for report in reporter.stats.get("skipped", ()))
    missing = re.findall(r"could not import '([\w.]+)'|(\w+) is not installed", reasons)
    return ", ".join(sorted({first or second for first, second in missing}))


def processor_seconds() -> float:
    """Return the processor time of this process and of all that it started, ended or not."""
    ticks, families = 0, [os.getpid()]
    for process in families:
        with contextlib.suppress(OSError):  # it ended meanwhile
            numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(number) for number in numbers[11:15])
            for task in Path(f"/proc/{process}/task").iterdir():
                families += map(int, (task / "children").read_text().split())
    return ticks / os.sysconf("SC_CLK_TCK")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; `make gpu-test` runs these")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all of tests/gpu, so that its files need not import pytest; skip without CUDA."""
    if hasattr(config, "workerinput"):
        items[:] = slow_files_first(items, config.workerinput["workercount"])
    gpu_items = []
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker("gpu")
        if item.get_closest_marker("gpu"):
            gpu_items.append(item)
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def slow_files_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Order the tests so that the workers of pytest-xdist end together.

    `--dist worksteal` gives each of them an equal part, and the end of a part to who is done. So
    each part begins with slow files. All that start several processes are in the first part: two
    such jobs at once would make each other wait.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    slow: list[list[pytest.Item]] = [[] for _ in range(workers)]
    fast: list[pytest.Item] = []
    part = 0
    for tests in files.values():
        marks = {mark.name for item in tests for mark in item.iter_markers()}
        if "distributed" in marks:
            slow[0].extend(tests)
        elif "slow" in marks:
            part = part % (workers - 1) + 1 if workers > 1 else 0
            slow[part].extend(tests)
        else:
            fast.extend(tests)
    ordered: list[pytest.Item] = []
    for number, tests in enumerate(slow):
        rest = max(0, len(items) * (number + 1) // workers - len(ordered) - len(tests))
        ordered += [*tests, *fast[:rest]]
        del fast[:rest]
    return ordered


@pytest.fixture(autouse=True, scope="session")
def _quick_linker() -> Iterator[None]:
    """Let g++ link the kernels of compiled graphs by gold, if the machine has it.

    ld reads all symbols of libtorch for every kernel: a fifth of the time that a kernel takes.
    """
    gold = shutil.which("ld.gold")
    if gold is None or "COMPILER_PATH" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        (Path(folder) / "ld").symlink_to(gold)
        patch.setenv("COMPILER_PATH", folder)  # where g++ looks first
        yield


@pytest.fixture(autouse=True, scope="module")
def _nothing_old_to_collect() -> None:
    """Keep what is imported or cached out of garbage collections.

    Runs that measure memory, or that recover it, collect garbage. With a million objects of
    imported libraries, each collection would take half a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


@pytest.fixture
def graphs_run_as_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let graphs run as traced: the compiler takes too long for most tests."""
    from wholebatch.compile.execute_mode import ExecutePlan

    plan = ExecutePlan.of

    def of(*args: Any) -> ExecutePlan:
        traced = plan(*args)
        traced.compiles = False
        return traced

    monkeypatch.setattr(ExecutePlan, "of", staticmethod(of))


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """Every recovery collects garbage: what is there before need not be looked at each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
