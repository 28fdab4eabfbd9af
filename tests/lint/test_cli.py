"""The command line: status, selection, settings, noqa, and going on after a bad file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import FrameType

import pytest

from wholebatch.cli import main as wholebatch
from wholebatch.cli.app import COMMANDS
from wholebatch.cli.lint_command import CLEAN, FOUND, UNREAD
from wholebatch.lint import lint_source

BAD = """
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y)
    loss.backward(){noqa}
    if i % accum == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
NOTE = """
accum = 4
for x, y in loader:
    (F.mse_loss(model(x), y) / accum).backward()
    if controller.should_update():
        optimizer.step()
        optimizer.zero_grad()
"""


def main(arguments: list[str]) -> int:
    return wholebatch(["lint", *arguments])


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(BAD.format(noqa=""))
    return file


def reported(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().out.splitlines()
    return [line.split()[1] for line in lines if not line.startswith("    | ")]


def test_status_and_lines(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train.py"]) == FOUND
    assert reported(capsys) == ["WB101", "WB109", "WB110"]
    assert main([".", "--select", "WB104"]) == CLEAN
    assert main(["--select", "WB10,WB110", "train.py"]) == FOUND
    assert reported(capsys) == ["WB101", "WB109", "WB110"]
    assert main(["train.py", "--ignore", "WB109", "--ignore", "WB110"]) == FOUND
    assert reported(capsys) == ["WB101"]


def test_notes_do_not_fail(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(NOTE)
    assert main(["train.py"]) == CLEAN
    said = capsys.readouterr()
    assert said.out.startswith(
        "train.py:4:5 WB003 note: this loop accumulates and was not understood; "
        "`wholebatch verify train.py` tells\n"
    )
    assert said.err == "0 findings and 1 note in 1 file\n"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["train.py", "--select", "XX1"], "error: XX1: names no rule"),
        (["train.py", "absent.py"], "error: absent.py: there is no such file or folder\n"),
        (["train.py", "--format", "xml"], "--format xml: must be one of text, json, github"),
        (["--explain", "WB999"], "no such rule; rules are WB101"),
        (["--explain", "X"], "--explain X: no such rule"),
    ],
)
def test_wrong_usage(
    script: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_a_folder_without_python_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("no code")
    assert main([str(tmp_path)]) == CLEAN
    assert capsys.readouterr() == ("", f"warning: no script or notebook to read in {tmp_path}\n")
    assert main([str(tmp_path), "--format", "json"]) == CLEAN
    out, err = capsys.readouterr()
    assert json.loads(out) == []
    assert "no script or notebook" in err


def test_the_source_line_is_shown_with_carets(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train.py", "--select", "WB101"])
    assert capsys.readouterr().out.splitlines()[1:] == [
        "    | loss.backward()",
        "    | ^^^^^^^^^^^^^^^",
    ]


def test_excluded_paths_of_a_folder(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([".", "--exclude", "train.py"]) == CLEAN
    assert main(["train.py", "--exclude", "train.py"]) == FOUND


def test_exit_zero(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train.py", "--exit-zero"]) == CLEAN
    assert reported(capsys) == ["WB101", "WB109", "WB110"]


def test_the_help_is_that_of_the_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    said = capsys.readouterr().out
    assert said.startswith(f"usage: wholebatch lint [PATH...] [options]\n\n{COMMANDS['lint']}\n")
    assert "--format text|json|github" in said
    assert "\nexamples:\n  wholebatch lint src/ --select WB1\n" in said


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_is_no_file_does_not_hang(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(script.parent / "pipe.py")
    os.symlink("/dev/zero", script.parent / "zero.py")
    assert main(["."]) == UNREAD
    assert reported(capsys)[:2] == ["WB002", "WB101"]
    assert main(["pipe.py", "zero.py"]) == UNREAD
    assert reported(capsys) == ["WB002", "WB002"]


def _lines_run(loops: int) -> int:
    """Return the linter's own lines that run for a file with this many loops."""
    text = "".join(BAD.format(noqa="").replace("loss", f"loss{n}") for n in range(loops))
    lines, before = 0, sys.gettrace()

    def trace(frame: FrameType, *_: object) -> object:
        nonlocal lines
        lines += 1
        return trace if "lint" in frame.f_code.co_filename else None

    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        assert len(lint_source(text)) >= loops
    finally:
        sys.settrace(before)
    return lines


def test_each_loop_of_a_file_costs_the_same() -> None:
    """Count lines, not seconds: a search through the other loops shows on a busy machine too."""
    _lines_run(1)
    few, some, many = map(_lines_run, (12, 20, 28))
    assert many - some == pytest.approx(some - few, rel=1e-3)


def test_explain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--explain", "wb104"]) == CLEAN
    assert capsys.readouterr().out == (
        "WB104: gradients cleared every micro-batch (error or note)\n\n"
        "`zero_grad` runs for every micro-batch, so only the last one of a window counts.\n\n"
        "The gradients of the other micro-batches are computed and thrown away: the\n"
        "update is that of a batch K times smaller, at K times the cost. Clear once per\n"
        "window, after the step.\n\n"
        f"{Path(__file__).parents[2] / 'docs' / 'lint' / 'WB104.md'}\n"
    )
    assert main(["--explain", "WB003"]) == CLEAN
    assert capsys.readouterr().out.startswith("WB003: a loop that accumulates in a way that")


@pytest.mark.parametrize(
    "comment, rest",
    [
        ("  # noqa", ["WB109", "WB110"]),
        ("  # noqa: WB101", ["WB109", "WB110"]),
        ("  # noqa: E501, wb101", ["WB109", "WB110"]),
        ("  # NOQA:WB101", ["WB109", "WB110"]),
        ("  # noqa: WB102", ["WB101", "WB109", "WB110"]),
    ],
)
def test_noqa(
    script: Path, capsys: pytest.CaptureFixture[str], comment: str, rest: list[str]
) -> None:
    script.write_text(BAD.format(noqa=comment))
    main(["train.py"])
    assert reported(capsys) == rest


def test_a_broken_file_is_reported_and_the_rest_goes_on(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (script.parent / "broken.py").write_text("def f(:\n    loss.backward()\n    opt.step()\n")
    (script.parent / "latin.py").write_bytes(b"x = '\xff'\n")
    (script.parent / "huge.py").write_text("x = 1\n" * 400_000)
    assert main(["broken.py", "latin.py", "huge.py"]) == UNREAD
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("broken.py:1:7 WB001 syntax error: ")
    assert lines[1].startswith("latin.py:1:1 WB002 cannot be read: ")
    assert lines[2].startswith("huge.py:1:1 WB002 file is 2,400,000 bytes, over the limit of 2,")
    assert main(["."]) == UNREAD
    assert set(reported(capsys)) == {"WB001", "WB002", "WB101", "WB109", "WB110"}


def test_no_torch_and_nothing_else_is_imported(script: Path) -> None:
    """In a fresh interpreter where torch, NumPy and rich cannot be imported."""
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'rich'): sys.modules[name] = None\n"
        "from wholebatch.cli import main\n"
        "sys.exit(main(['lint', 'train.py']))\n"
    )
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=script.parent,
        env={"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == FOUND, done.stderr
    assert len(done.stdout.splitlines()) == 9


def test_as_a_module(script: Path) -> None:
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-m", "wholebatch.lint", "train.py", "--select", "WB110"],
        cwd=script.parent,
        env={"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == FOUND
    assert done.stdout.startswith("train.py:5:8 WB110 boundary is off by one")
    assert done.stderr == "1 finding in 1 file\n"


def test_a_syntax_error_is_2_whatever_is_selected_and_with_exit_zero(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text("def f(:\n")
    assert main(["train.py", "--select", "WB114", "--exit-zero"]) == UNREAD
    assert reported(capsys) == ["WB001"]


def test_columns_count_characters(script: Path) -> None:
    (finding,) = lint_source(
        "for i, (x, y) in enumerate(cycle(loader)):\n"
        "    'äöü€'; F.mse_loss(model(x), y).backward()\n"
        "    if (i + 1) % accum == 0:\n        optimizer.step(); optimizer.zero_grad()\n"
    )
    assert (finding.code, finding.column, finding.end_column) == ("WB101", 13, 47)
