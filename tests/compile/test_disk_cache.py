"""A damaged, foreign, read-only or full disk cache costs time, and changes no result."""

from __future__ import annotations

import errno
import logging
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from wholebatch.cli.app import run
from wholebatch.compile import compile_workers, disk_cache
from wholebatch.compile.inductor import compiled_by_inductor
from wholebatch.compile.repeated_blocks import PieceProgram, _Input, _Result

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor imports its own

aten = torch.ops.aten
MATRIX = ((3, 3), (3, 1), torch.float64, torch.device("cpu"))
PIECE = PieceProgram(
    [
        (aten.mm.default, (_Input(0), _Input(1)), {}),
        (aten.mm.default, (_Result(0), _Input(1)), {}),
    ],
    [MATRIX, MATRIX],
    [1],
)
"""Kernels of a library alone: no C++ is compiled."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / "inductor"


def error() -> float:
    """Compile the piece as a new process would; return the error of what it computes."""
    from torch._inductor.utils import clear_caches
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    clear_caches()
    with FakeTensorMode(shape_env=ShapeEnv()):
        examples = PIECE.examples()
    run_piece = compiled_by_inductor(PIECE.module(), examples, more={}, whole_rows=4096)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(3, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    [found] = run_piece(a, b)
    wanted = a @ b @ b
    return float((found - wanted).norm() / wanted.norm())


def test_a_worker_compiles_a_piece_of_open_sizes(folder: Path) -> None:
    from torch._dynamo.source import ConstantSource
    from torch._dynamo.utils import counters
    from torch._inductor.utils import clear_caches
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    known, source = ShapeEnv(), ConstantSource("size_0")
    symbol = known.create_symbol(5, source, DimDynamic.DYNAMIC)
    rows = known.create_symintnode(symbol, hint=5, source=source)
    tall = ((2 * rows, 3), (3, 1), torch.float64, torch.device("cpu"))
    products = [(aten.mm.default, (one, _Input(2)), {}) for one in (_Input(1), _Result(0))]
    piece = PieceProgram(products, [rows, tall, MATRIX], [1])
    job = compile_workers.job_of(piece, {"more": {}, "whole_rows": 4096})
    assert not job.known
    compile_workers._compile(job.message)  # in the worker
    assert job.known
    clear_caches()
    counters.clear()
    with FakeTensorMode(shape_env=known):
        examples = piece.examples()
    run_piece = compiled_by_inductor(piece.module(), examples, more={}, whole_rows=4096)
    assert counters["inductor"]["fxgraph_cache_hit"] == 1
    assert not counters["inductor"]["fxgraph_cache_miss"]
    a, b = torch.randn(14, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    assert torch.equal(run_piece(7, a, b)[0], a @ b @ b)


def damage(folder: Path, kind: str, choose: random.Random) -> None:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    for file in files:
        content = file.read_bytes()
        if kind == "truncated":
            file.write_bytes(content[: choose.randrange(len(content) + 1)])
        elif kind == "foreign":
            file.write_bytes(choose.choice(files).read_bytes())
        elif kind == "noise":
            file.write_bytes(choose.randbytes(len(content)))
        else:
            file.unlink()


# torch's own destructor fails for an entry that it could not read to the end.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["truncated", "foreign", "noise", "removed"])
def test_a_damaged_cache_changes_nothing(folder: Path, kind: str) -> None:
    choose = random.Random(kind)
    assert error() <= 1e-12
    assert any(file.is_file() for file in folder.rglob("*"))
    for _ in range(5):
        damage(folder, kind, choose)
        assert error() <= 1e-12


@pytest.mark.parametrize("reason", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_cache_that_cannot_be_written_is_done_without(
    folder: Path, reason: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._inductor import codecache

    plain = codecache.write_atomic

    def write(path: Any, *given: Any, **options: Any) -> None:
        if str(path).startswith(str(folder)):
            raise OSError(reason, os.strerror(reason), str(path))
        plain(path, *given, **options)

    monkeypatch.setattr(codecache, "write_atomic", write)
    with caplog.at_level(logging.WARNING, logger="wholebatch.compile"):
        assert error() <= 1e-12
    assert "the disk cache cannot be used" in caplog.text


def test_an_error_of_the_compiler_is_not_taken_for_one_of_the_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wholebatch.compile import inductor

    tried = []

    def fail(*_: Any) -> Any:
        tried.append(1)
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(inductor, "_compiled", fail)
    with pytest.raises(NotImplementedError, match="no such kernel"):
        error()
    assert len(tried) == 1


def test_the_oldest_files_go_first(folder: Path) -> None:
    for number, name in enumerate(("old", "new", "newest")):
        file = folder / "a" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(100))
        os.utime(file, (number, number))
    assert disk_cache.trim(250) == 100
    assert sorted(file.name for file in (folder / "a").iterdir()) == ["new", "newest"]
    assert disk_cache.trim(250) == 0
    assert disk_cache.clear() == 200
    assert not list(folder.iterdir())


def test_the_command_shows_and_clears(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cache"]) == 0
    assert "Inductor: 0 bytes in 0 files" in capsys.readouterr().out
    folder.mkdir()
    (folder / "one").write_bytes(bytes(3000))
    assert run(["cache"]) == 0
    shown = capsys.readouterr().out
    assert "Inductor: 2.93 KiB in 1 files" in shown
    assert str(folder) in shown
    assert run(["cache", "--keep", "1"]) == 0
    assert "removed 0 bytes" in capsys.readouterr().out
    assert run(["cache", "--clear"]) == 0
    assert "removed 2.93 KiB" in capsys.readouterr().out
    assert run(["cache", "--keep", "0"]) == 2


def test_the_folders_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert str(disk_cache.cache_folders()[0].path) == default_cache_dir()
