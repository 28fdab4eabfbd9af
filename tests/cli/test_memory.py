"""`wholebatch train --memory`: what is chosen, what is said, and what does not fit."""

from __future__ import annotations

import pytest

from wholebatch.cli import main
from wholebatch.cli.run_settings import Given, resolve
from wholebatch.errors import OptionError


def test_a_budget_on_a_cpu_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits-cnn", "--memory", "1GiB"]) == 2
    assert "with a model on a CPU, where nothing refuses memory" in capfd.readouterr().err


@pytest.mark.parametrize("memory", ["much", "0", "-1GiB", "1.5", "20", ""])
def test_budgets_that_mean_nothing(memory: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"--memory={memory}"]) == 2
    assert "must be a size such as 20GiB" in capfd.readouterr().err


def test_settings_say_what_is_chosen_by_whom() -> None:
    defaults = {"micro_batch": 8}
    assert resolve(Given(), defaults, stored=None).micro_batch == 8
    chosen = resolve(Given(memory="0.5"), defaults, stored=None)
    assert (chosen.micro_batch, chosen.budget) == ("auto", 0.5)
    assert resolve(Given(memory="1GiB", micro_batch="4"), defaults, stored=None).micro_batch == 4
    stored = {**vars(chosen), "micro_batch": 8}
    del stored["memory"]  # a run from before there was the setting
    assert resolve(Given(), {}, stored=stored).memory is None
    assert resolve(Given(memory="2GiB"), {}, stored=stored).memory == "2GiB"
    with pytest.raises(OptionError, match="--checkpointing True: the run that --resume continues"):
        resolve(Given(checkpointing=True), {}, stored=stored)
