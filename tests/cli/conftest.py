"""Ways to run the command on a small recipe: in this process, or in one of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import processes
from tests.cli.helpers import NOISY, Ran, environment_of


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not flush to the disk in this process: on a busy one that takes seconds each time."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Path]:
    """Write a recipe: NOISY, or the text given, with `old, new` replaced in it."""

    def write(text: str = NOISY, *changes: tuple[str, str], name: str = "mine.py") -> Path:
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ran]:
    """`wholebatch ARGUMENTS` in this process, from a folder of its own."""
    from wholebatch.cli import main

    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Ran:
        capfd.readouterr()
        status = main([str(argument) for argument in arguments])
        said = capfd.readouterr()
        return Ran(status, said.out, said.err)

    return run


@pytest.fixture
def process(tmp_path: Path) -> Callable[..., Ran]:
    """`wholebatch ARGUMENTS` in a new process, with one thread."""

    def run(*arguments: object, timeout: float = 120, **environment: str) -> Ran:
        done = processes.run(
            "wholebatch.cli",
            *map(str, arguments),
            cwd=tmp_path,
            environment=environment_of(**environment),
            timeout=timeout,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return run
