"""The note for loops that are not understood, and false alarms that must stay silent."""

from __future__ import annotations

import textwrap

import pytest

from wholebatch.lint import lint_source


def codes(source: str) -> list[str]:
    return [f.code for f in lint_source(textwrap.dedent(source), path="train.py")]


NOTED = {
    "a boundary of another file": """
        for batch in loader:
            (F.mse_loss(model(batch), y) / accum).backward()
            if controller.should_update():
                optimizer.step()
    """,
    "a counter of samples": """
        samples = 0
        for batch in loader:
            F.mse_loss(model(batch), y).backward()
            samples += len(batch)
            if samples >= 4 * accum_size:
                optimizer.step()
                optimizer.zero_grad()
                samples = 0
    """,
    "a counter that goes down": """
        left = accum_steps
        for batch in loader:
            (F.mse_loss(model(batch), y) / accum_steps).backward()
            left -= 1
            if left == 0:
                optimizer.step()
                optimizer.zero_grad()
                left = accum_steps
    """,
}


@pytest.mark.parametrize("name", NOTED)
def test_what_is_not_understood_gets_one_note(name: str) -> None:
    (finding,) = lint_source(textwrap.dedent(NOTED[name]), path="train.py")
    assert (finding.code, finding.level) == ("WB003", "note")
    assert finding.message == (
        "this loop accumulates and was not understood; `wholebatch verify train.py` tells"
    )


SILENT = {
    "gradients of a teacher that are cleared": """
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(total):
            (F.mse_loss(model(x), teacher(x)) / accum).backward()
            teacher.zero_grad()
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
    """,
    "a loop that does not accumulate": """
        for batch in loader:
            compute(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
}


@pytest.mark.parametrize("name", SILENT)
def test_what_is_right_is_left_in_peace(name: str) -> None:
    assert codes(SILENT[name]) == []


def test_a_note_can_be_silenced() -> None:
    source = NOTED["a boundary of another file"].replace(".backward()", ".backward()  # noqa")
    assert codes(source) == []


def test_no_message_names_a_number_that_is_not_in_the_file() -> None:
    source = """
        for batch in loader:
            for part in batch.chunk(size):
                F.cross_entropy(model(part), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    (finding,) = lint_source(textwrap.dedent(source))
    assert finding.message.startswith("loss is not divided by the number of micro-batches: ")
