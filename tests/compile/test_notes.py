"""What a user sees who has set up no logging: one line when it gets faster, or why it cannot."""

from __future__ import annotations

import logging
import time

import pytest

from tests.compile.nets import traced
from tests.support import loss, mlp, samples
from wholebatch.compile import execute_mode
from wholebatch.compile.execute_mode import Notes


def test_one_line_says_that_micro_steps_are_a_graph(capsys: pytest.CaptureFixture[str]) -> None:
    train = traced(mlp(), loss=loss, micro_batch=2)
    for _ in range(6):
        train.step(samples(8))
    shown = [line for line in capsys.readouterr().err.splitlines() if "waits" not in line]
    assert shown == ["wholebatch: micro-steps are now one traced graph"]


def test_a_reason_is_shown_once_and_not_where_logs_are_kept(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    notes = Notes(asked=False)
    for _ in range(2):
        notes.fell_back("auto", "eagerly", "it decides by a value")
    assert capsys.readouterr().err == "wholebatch: micro-steps run eagerly: it decides by a value\n"
    with caplog.at_level(logging.INFO, logger="wholebatch.compile"):
        notes.tell("another line", shows=True)
    assert capsys.readouterr().err == ""
    assert "another line" in caplog.text
    notes.tell("a third line")
    assert capsys.readouterr().err == ""


def test_the_user_is_told_what_the_run_waits_for_while_it_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(execute_mode, "_SILENT", 0.01)
    notes = Notes(asked=False)
    for _ in range(2):  # Each time.
        with notes.working("tracing a micro-step"):
            time.sleep(0.1)
            assert notes.work == "tracing a micro-step, 0 s"
            assert capsys.readouterr().err == (
                "wholebatch: tracing a micro-step: the run waits for it\n"
            )
    assert notes.work is None
    with notes.working("recording"):
        pass
    time.sleep(0.05)
    assert capsys.readouterr().err == ""
