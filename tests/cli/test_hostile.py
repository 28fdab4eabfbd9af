"""Folders and disks that do not do what a run expects: one clear line, and the right exit code."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.cli.helpers import NOISY, Ran, environment_of, metrics_of
from tests.cli.test_resume import assert_same_run
from wholebatch import plain_files
from wholebatch import plain_files as files
from wholebatch.cli.report.metrics_writers import MetricsFile, writing

pytestmark = pytest.mark.timeout(120)  # a FIFO that is waited for would hang

Command = Callable[..., Ran]
Write = Callable[..., Path]
Broken = Callable[[Path], object]


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def only(checkpoint: Broken) -> Broken:
    """The newest checkpoint made so, and no other left."""

    def make(run: Path) -> None:
        old, new = sorted((run / "checkpoints").iterdir())
        old.unlink()
        checkpoint(new)

    return make


def file_for_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.touch()


CKPT = "checkpoints/window-00000006.pt"
BROKEN: dict[str, tuple[Broken, str]] = {
    "config: brackets": (
        lambda run: (run / "config.json").write_text("[" * 100_000),
        "config.json is damaged: it does not hold the settings of a run (it is nested too deeply)",
    ),
    "config: not UTF-8": (
        lambda run: (run / "config.json").write_bytes(b'{"recipe": "\xff"}'),
        "config.json is damaged: it does not hold the settings of a run (byte 12 is not UTF-8)",
    ),
    "config: FIFO": (
        lambda run: fifo(run / "config.json"),
        "config.json cannot be read: it is a FIFO, not a file",
    ),
    "config: folder": (
        lambda run: folder(run / "config.json"),
        "config.json cannot be read: it is a folder, not a file",
    ),
    "config: loop": (
        lambda run: loop(run / "config.json"),
        "config.json cannot be read: Too many levels of symbolic links",
    ),
    "checkpoint: FIFO": (only(fifo), f"{CKPT} cannot be read: it is a FIFO, not a file"),
    "checkpoint: folder": (only(folder), f"{CKPT}/rest.pt cannot be read: No such file"),
    "checkpoint: loop": (only(loop), f"{CKPT} cannot be read: Too many levels of symbolic"),
    "checkpoint: empty": (
        only(lambda path: path.write_bytes(b"")),
        f"{CKPT} is damaged: File is not a zip file",
    ),
    "metrics: FIFO": (lambda run: fifo(run / "metrics.jsonl"), "metrics.jsonl is not a file"),
    "metrics: folder": (lambda run: folder(run / "metrics.jsonl"), "metrics.jsonl is not a file"),
    "tensorboard: file": (
        lambda run: file_for_folder(run / "tensorboard"),
        "tensorboard cannot be written: File exists",
    ),
    "checkpoints: file": (
        lambda run: file_for_folder(run / "checkpoints"),
        "cannot be written: File exists (run/checkpoints)",
    ),
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
    ran = command("train", "--resume", "--out", "run", "--steps", 8)
    assert ran.status == 2, ran.err
    [line, *advice] = ran.err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert all("continue from the last checkpoint" in one for one in advice)


def test_files_that_may_not_be_read(
    command: Command, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    open_as_owner = os.open

    def refused(path: Any, flags: int, *more: Any) -> int:  # root may read everything
        if str(path).endswith("config.json"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open_as_owner(path, flags, *more)

    monkeypatch.setattr(files.os, "open", refused)
    ran = command("train", "--resume", "--out", "run")
    assert (ran.status, ran.err) == (
        2,
        "error: run/config.json cannot be read: Permission denied\n",
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "f.py"], "recipe 'f.py' is not a file; give a Python file"),
        (["train", "mine.py", "--from", "f.py"], "--from f.py: cannot be read: it is a FIFO"),
        (["report", "f.py"], "f.py: cannot be read: it is a FIFO, not a file"),
        (["plan", "hf:f.py"], "hf:f.py: cannot be read: it is a FIFO, not a file"),
        (["train", "mine.py", "--out", "loop"], "--out loop: is a link that leads nowhere"),
        (["train", "mine.py", "--out", "a\0b"], "embedded null byte"),
        (["train", "a\0b"], r"recipe 'a\x00b': there is no such file"),
        (["train", "mine.py", "--from", "a\0b"], "embedded null byte"),
    ],
)
def test_paths_that_are_no_files(
    command: Command, recipe: Write, tmp_path: Path, arguments: list[str], said: str
) -> None:
    recipe(NOISY)
    os.mkfifo(tmp_path / "f.py")
    (tmp_path / "loop").symlink_to("loop")
    ran = command(*arguments)
    assert ran.status == 2
    assert said in ran.err
    assert ran.err.count("\n") == 1


GONE = (
    "    global calls\n",
    "    global calls\n    import shutil\n    if calls == 7: shutil.rmtree('run')\n",
)


def test_a_folder_that_is_removed_while_it_runs(command: Command, recipe: Write) -> None:
    ran = command("train", recipe(NOISY, GONE), "--out", "run")
    assert ran.status == 1
    assert ran.err == (
        "error: run was removed or moved while the run was writing to it: nothing more can be "
        "saved there\n"
    )


def limited(tmp_path: Path, recipe: Path, size: int, *options: object) -> Ran:
    """`train` in a process whose files may not grow beyond `size` bytes: as a disk that fills."""
    program = tmp_path / "limited.py"
    program.write_text(
        "import resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
        "from wholebatch.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    done = processes.run(
        program,
        *map(str, ("train", recipe, "--out", "run", *options)),
        cwd=tmp_path,
        environment=environment_of(),
        timeout=120,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def test_a_disk_that_fills_at_a_checkpoint(command: Command, recipe: Write, tmp_path: Path) -> None:
    """The first is written before there is optimizer state: it fits, the next does not."""
    path = recipe(NOISY)
    ran = limited(tmp_path, path, 20_000)
    assert ran.status == 1
    error, advice = ran.err.splitlines()
    assert "error: cannot write checkpoint run/checkpoints/window-00000002.pt: " in error
    assert "; the last good one is run/checkpoints/window-00000000.pt" in error
    assert advice.startswith("  continue from the last checkpoint: ")
    assert command("train", "--resume", "--out", "run").status == 0
    assert command("train", path, "--out", "straight").status == 0
    assert_same_run(tmp_path / "straight", tmp_path / "run")


def test_a_disk_that_fills_at_what_is_watched(
    command: Command, recipe: Write, tmp_path: Path
) -> None:
    path = recipe(NOISY)
    ran = limited(tmp_path, path, 60_000, "--steps", 200, "--checkpoint-every", 50)
    assert ran.status == 1
    error, advice = ran.err.splitlines()
    assert error == "error: cannot write run/tensorboard: File too large"  # it grows fastest
    assert advice.startswith("  continue from the last checkpoint: ")
    made = command("train", "--resume", "--out", "run", "--steps", 120)
    assert made.status == 0, made.err
    assert [record["update"] for record in metrics_of(tmp_path / "run")] == list(range(1, 121))


def test_a_disk_that_fills_at_the_metrics(
    command: Command, recipe: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: MetricsFile, record: object) -> None:
        with writing(self.path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(MetricsFile, "write", full)
    ran = command("train", recipe(NOISY), "--out", "run")
    assert ran.status == 1
    assert ran.err.startswith("error: cannot write run/metrics.jsonl: No space left on device\n")


def test_a_page_on_a_full_disk(
    command: Command, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(plain_files, "to_disk", full)
    (tmp_path / "x.html").write_text("of before")
    ran = command("report", finished, "--out", tmp_path / "x.html")
    assert ran.status != 0
    assert (tmp_path / "x.html").read_text() == "of before"
    assert "x.html: cannot be written: No space left on device" in ran.err
