"""The blocks of docs/testing.md run: each is a test file of its own, and passes."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^```python\n# (test_\w+)\.py\n(.*?)^```", PAGE, re.M | re.S))
NEEDS = {"test_transformers": "transformers", "test_zero": "deepspeed", "test_jax": "jax"}
OF_RANKS = {"test_zero", "test_fsdp2"}


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import the block from a file, as the processes that it spawns do, and call its test."""
    pytest.importorskip(NEEDS.get(name, "torch"))
    (folder / f"{name}_block.py").write_text(BLOCKS[name], encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(folder)
    module = importlib.import_module(f"{name}_block")
    try:
        [test] = [value for key, value in vars(module).items() if key.startswith("test_")]
        test()
    finally:
        del sys.modules[f"{name}_block"]


def test_all_blocks_are_known() -> None:
    assert BLOCKS.keys() == {
        "test_own", "test_transformers", "test_zero", "test_fsdp2", "test_rl", "test_jax"
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(BLOCKS.keys() - OF_RANKS))
def test_a_block(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(name, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", sorted(OF_RANKS))
def test_a_block_of_ranks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(name, tmp_path, monkeypatch)
