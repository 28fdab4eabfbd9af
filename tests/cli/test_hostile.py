"""Folders and disks that do not do what a run expects: one clear line, and the right exit code."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.helpers import NOISY, Ran
from tests.cli.test_resume import assert_same_run
from wholebatch.cli.metrics import Metrics

Command = Callable[..., Ran]
Write = Callable[..., Path]
Broken = Callable[[Path], object]


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def only(broken: Broken) -> Broken:
    """The state of the newest checkpoint made so, and no other left."""

    def make(run: Path) -> None:
        old, new = sorted((run / "checkpoints").iterdir())
        shutil.rmtree(old)
        broken(new / "state.pt")

    return make


CKPT = "checkpoints/window-00000006"
BROKEN: dict[str, tuple[Broken, str]] = {
    "config: not JSON": (
        lambda run: (run / "config.json").write_bytes(b'{"recipe": "\xff"}'),
        "config.json: is not JSON: ",
    ),
    "config: unknown setting": (
        lambda run: (run / "config.json").write_text('{"recipe": "x", "settings": {"y": 1}}'),
        "config.json: the setting 'y' is not known; the run began with",
    ),
    "config: folder": (
        lambda run: folder(run / "config.json"),
        "config.json: cannot be read: Is a directory",
    ),
    "checkpoint: empty": (
        only(lambda path: path.write_bytes(b"")),
        f"{CKPT} is damaged: the checksum of state.pt is wrong",
    ),
    "metrics: folder": (lambda run: folder(run / "metrics.jsonl"), "metrics.jsonl: Is a directory"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from wholebatch.cli import main

    place = tmp_path_factory.mktemp("finished")
    (place / "mine.py").write_text(NOISY, encoding="utf-8")
    assert main(["train", str(place / "mine.py"), "--out", str(place / "run")]) == 0
    return place / "run"


@pytest.mark.parametrize("what", BROKEN)
def test_a_run_that_cannot_be_resumed(
    command: Command, finished: Path, tmp_path: Path, what: str
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    make, message = BROKEN[what]
    make(tmp_path / "run")
    ran = command("train", "--resume", "--out", "run", "--updates", 8)
    assert ran.status == 2, ran.err
    [line] = ran.err.splitlines()
    assert line.startswith("error: ")
    assert message in line


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Limit the files that this process writes to `size` bytes: as a disk that fills."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_at_a_checkpoint(
    command: Command, recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight kilobytes are too few for the first checkpoint; what was there before is kept."""
    path = recipe(NOISY)
    assert command("train", path, "--out", "run", "--updates", 2).status == 0
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a module cut off would stay
    with no_file_beyond(8_000):
        ran = command("train", path, "--out", "run", "--resume", "--updates", 6)
    assert ran.status == 2
    assert (
        "error: cannot write checkpoint run/checkpoints/window-00000004: File too large" in ran.err
    )
    assert "; the last good one is run/checkpoints/window-00000002" in ran.err
    assert command("train", "--resume", "--out", "run").status == 0
    assert command("train", path, "--out", "straight").status == 0
    assert_same_run(tmp_path / "straight", tmp_path / "run")


def test_a_disk_that_fills_at_the_metrics(
    command: Command, recipe: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Metrics, record: object) -> None:
        self._file.close()
        descriptor = os.open("/dev/full", os.O_WRONLY)
        self._file = os.fdopen(descriptor, "wb")
        write(self, record)  # type: ignore[arg-type]

    write = Metrics.write
    monkeypatch.setattr(Metrics, "write", full)
    ran = command("train", recipe(NOISY), "--out", "run")
    assert ran.status == 2
    assert ran.err == "error: cannot write run/metrics.jsonl: No space left on device\n"
