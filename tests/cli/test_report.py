"""Metrics have each window exactly once; the terminal shows a bar, a log gets plain lines."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from wholebatch.cli.report.metrics_writers import Events, MetricsFile, record_of
from wholebatch.cli.report.terminal_output import Terminal, short_count
from wholebatch.errors import MissingExtraError, StateError
from wholebatch.window.window import Step


def step(update: int, **more: Any) -> Step:
    values = {"loss": 2.0, "units": 10.0, "grad_norm": 1.0, "micro_batches": 3, "seconds": 0.5}
    return Step(update=update, **{**values, **more})


def record(window: int, **more: Any) -> dict[str, Any]:
    return record_of(step(window, **more), window=window, epoch=0, lr=[0.1], now=1.0)


def written(path: Path, windows: int) -> MetricsFile:
    metrics = MetricsFile(path, windows=0)
    for window in range(1, windows + 1):
        metrics.write(record(window))
    metrics.sync()
    return metrics


def test_a_line_per_window(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 3).close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["window"] for line in lines] == [1, 2, 3]
    assert lines[0]["units_per_second"] == 20.0
    assert lines[0]["lr"] == 0.1


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_what_lies_beyond_the_checkpoint_is_cut_off(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 3).close()
    with path.open("ab") as file:
        file.write(b'{"window": 4, "los')  # killed while writing
    metrics = MetricsFile(path, windows=kept)
    assert (metrics.first is None) == (kept == 0)
    metrics.write(record(kept + 1, loss=9.0))
    metrics.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["window"] for line in lines] == list(range(1, kept + 2))
    assert lines[-1]["loss"] == 9.0


@pytest.mark.parametrize("text", [None, "", '{"window": 7}\n'])
def test_a_file_that_is_gone_begins_anew(tmp_path: Path, text: str | None) -> None:
    """A log must not keep a checkpoint from being used; and it is told."""
    path = tmp_path / "metrics.jsonl"
    if text is not None:
        path.write_text(text)
    metrics = MetricsFile(path, windows=5)
    assert metrics.lost == 5
    metrics.write(record(6))
    metrics.write(record(7))
    metrics.close()
    again = MetricsFile(path, windows=6)
    again.close()
    assert again.lost == 5
    assert [json.loads(line)["window"] for line in path.read_text().splitlines()] == [6]


@pytest.mark.parametrize("text", ['{"window": 1}\n{"window": 3}\n', "[]\n", '{"window": 1}\n'])
def test_a_file_that_lost_lines_is_noticed(tmp_path: Path, text: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(StateError, match="of the 2 windows before the checkpoint"):
        MetricsFile(path, windows=2)


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "m.jsonl", windows=0)
    metrics.write(record(1, grad_norm=float("inf"), terms={"lm": float("nan"), "aux": 1.0}))
    metrics.close()
    line = json.loads((tmp_path / "m.jsonl").read_text())
    assert line["grad_norm"] is None
    assert line["terms"] == {"lm": None, "aux": 1.0}


def test_events_are_what_tensorboard_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer as files

    # Files of one second are read in the order of their numbers as text: 10 comes before 9.
    monkeypatch.setattr(files, "_global_uid", files.AtomicCounter(0))
    events = Events(tmp_path, windows=0)
    for window in (1, 2, 3):
        events.write(record(window, loss=float(window), terms={"lm": 0.5}))
    events.close()
    resumed = Events(tmp_path, windows=2)  # window 3 was made after the checkpoint
    resumed.write(record(3, loss=30.0))
    resumed.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(one.step, one.value) for one in read.Scalars("loss")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]
    assert {"lr", "grad_norm", "units_per_second", "terms/lm"} <= set(read.Tags()["scalars"])


def test_without_tensorboard_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[tensorboard\]'"):
        Events(tmp_path, windows=0)


def shown(*, terminal: bool) -> tuple[Terminal, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100, _environ={})
    return Terminal(console, name="mine", unit="tokens"), file


def test_a_log_gets_the_first_and_last_line_and_one_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("wholebatch.cli.report.terminal_output.time.perf_counter", lambda: now[0])
    terminal, file = shown(terminal=False)
    terminal.begin(done=0, total=20)
    for update in range(1, 21):
        now[0] += 1.0
        terminal.update(updates=update, loss=3.0, units_per_second=12345.0)
    terminal.end()
    lines = file.getvalue().splitlines()
    assert lines[0] == "update 1/20  loss 3.000  12.3k tokens/s  0:19 left"
    assert [line.split()[1] for line in lines] == ["1/20", "6/20", "11/20", "16/20", "20/20"]
    assert lines[-1] == "update 20/20  loss 3.000  12.3k tokens/s"


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    terminal, file = shown(terminal=True)
    terminal.begin(done=2, total=4)
    terminal.update(updates=3, loss=1.5, units_per_second=10.0)
    terminal.note("a [note] with brackets")
    terminal.end()
    text = file.getvalue()
    assert "━" in text
    assert "a [note] with brackets" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor comes back


@pytest.mark.parametrize("terminal", [False, True])
def test_rows_show_paths_as_they_are(terminal: bool) -> None:
    screen, file = shown(terminal=terminal)
    screen.rows("title", [("written to", "runs/[x]/y"), ("", "more")], boxed=True)
    assert "runs/[x]/y" in file.getvalue()
    assert ("╭" in file.getvalue()) == terminal


def test_counts_have_three_figures() -> None:
    assert [short_count(n) for n in (0.5, 9.99, 99.6, 999.9, 1000, 99_950, 1e6, 2.5e9)] == [
        "0.5",
        "9.99",
        "100",
        "1.00k",
        "1.00k",
        "100k",
        "1.00M",
        "2.50G",
    ]
