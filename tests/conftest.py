"""What all tests share: a fixed seed, and GPU tests that wait for a GPU."""

from __future__ import annotations

import gc
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

GPU_TESTS = Path(__file__).parent / "gpu"

try:
    import hypothesis
except ImportError:  # a machine where nothing can be installed runs tests/gpu without it
    pass
else:
    # No deadline: the first example of a test pays for torch's warm-up. Derandomized: what failed
    # once fails again, on every machine.
    hypothesis.settings.register_profile("wholebatch", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("wholebatch")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; `make gpu-test` runs these")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all of tests/gpu, so that its files need not import pytest; skip without CUDA."""
    if hasattr(config, "workerinput"):
        items[:] = slow_files_first(items)
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


def slow_files_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Order the tests so that two workers of pytest-xdist end together.

    `--dist worksteal` gives each of them one half, and the end of a half to who is done. So each
    half begins with slow files. All that start several processes are in the first half: two such
    jobs at once would make each other wait.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    jobs: list[pytest.Item] = []
    slow: list[pytest.Item] = []
    fast: list[pytest.Item] = []
    for tests in files.values():
        marks = {mark.name for item in tests for mark in item.iter_markers()}
        (jobs if "distributed" in marks else slow if "slow" in marks else fast).extend(tests)
    rest = max(0, len(items) // 2 - len(jobs))
    return [*jobs, *fast[:rest], *slow, *fast[rest:]]


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
        made = plan(*args)
        made.compiles = False
        return made

    monkeypatch.setattr(ExecutePlan, "of", staticmethod(of))
