"""What a user sees who has set up no logging: one line when it gets faster, or why it cannot."""

from __future__ import annotations

import logging

import pytest

from tests.compile.nets import traced
from tests.support import loss, mlp, samples
from wholebatch.compile.execute_mode import Notes


def test_one_line_says_that_micro_steps_are_a_graph(capsys: pytest.CaptureFixture[str]) -> None:
    train = traced(mlp(), loss=loss, micro_batch=2)
    for _ in range(6):
        train.step(samples(8))
    shown = capsys.readouterr().err.splitlines()
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
