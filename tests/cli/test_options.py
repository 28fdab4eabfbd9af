"""Options: bad input is one line that says what is allowed, with exit status 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from wholebatch.cli import main
from wholebatch.cli.app import COMMANDS, load
from wholebatch.cli.command_options import Command, command
from wholebatch.cli.run_settings import Config, Given, config_text, read_config, resolve
from wholebatch.errors import OptionError, StateError

FREE = {"--wandb", "--out", "--exclude"}
"""Options that take any text but the empty one."""


def bad_inputs() -> list[tuple[str, str, list[str]]]:
    """Every option of every command, with values that it cannot take; `argparse` knows them."""
    found: list[tuple[str, str, list[str]]] = []
    for name in COMMANDS:
        loaded = load(name)
        assert isinstance(loaded, Command)
        parser = loaded.parser()
        for action in parser._actions:
            if not action.option_strings or action.option_strings[0] in ("-h", "--"):
                continue
            flag, values = action.option_strings[0], [""]
            if flag not in FREE:
                values += ["§"] if action.nargs == 0 else ["§", "-1", "nan", "1e999"]
            found.append((name, flag, values))
    return found


@pytest.mark.parametrize(("name", "flag", "values"), bad_inputs())
def test_bad_input_for_every_option(
    name: str,
    flag: str,
    values: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    allowed = ("must be", "is empty", "choose from", "takes no value", "codes are", "rules are")
    allowed += ("belongs to",)
    for value in values:
        assert main([name, f"{flag}={value}"]) == 2
        said = capfd.readouterr()
        assert said.out == ""
        assert said.err.startswith("error: ")
        assert said.err.count("\n") == 1
        assert flag.lstrip("-") in said.err
        assert any(word in said.err for word in allowed), said.err
    assert not list(tmp_path.iterdir())


def test_the_command_line_wins_over_the_recipe_and_that_over_the_default() -> None:
    config = resolve(
        Given(batch_size=8, micro_batch=" 3 "),
        {"batch_size": 64, "updates": 7, "precision": "fp32"},
        stored=None,
    )
    assert (config.batch_size, config.micro_batch, config.updates) == (8, 3, 7)
    assert (config.precision, config.seed, config.clip_norm) == ("full", 0, None)


def test_a_stored_run_may_get_longer_but_not_another() -> None:
    stored = resolve(Given(batch_size=8, micro_batch=4, seed=3), {}, stored=None).stored
    assert resolve(Given(), {"batch_size": 99}, stored=stored).batch_size == 8
    assert resolve(Given(updates=20, batch_size=8), {}, stored=stored).updates == 20
    assert resolve(Given(precision="fp32"), {}, stored=stored).precision == "full"
    for given, message in (
        (Given(batch_size=9), "--batch-size 9: the run that --resume continues has 8"),
        (Given(seed=4), "--seed 4"),
        (Given(micro_batch="auto"), "--micro-batch auto"),
        (Given(lr=0.1), "--lr 0.1"),
    ):
        with pytest.raises(OptionError, match=message):
            resolve(given, {}, stored=stored)


def test_config_is_written_and_read(tmp_path: Path) -> None:
    config = resolve(Given(micro_batch="512 tokens"), {}, stored=None)
    assert config.tokens == 512
    path = tmp_path / "config.json"
    path.write_text(config_text(config, recipe="x.py"))
    stored = read_config(path)
    assert stored["recipe"] == "x.py"
    assert resolve(Given(), {}, stored=stored["settings"]) == config


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"recipe": 1, "settings": {}}', "\x00"])
def test_a_damaged_config_is_one_clear_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(StateError, match=r"config.json( is damaged|: is not JSON)"):
        read_config(path)


def test_ctrl_c_is_told(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("wholebatch.cli.app.load", interrupted)
    assert main(["train"]) == 130
    assert capfd.readouterr().err == "stopped\n"


def test_every_option_of_train_is_a_field_and_none_is_filled_in() -> None:
    """The command gets what was typed, a 0 too, and knows what was not."""
    seen: list[Given] = []
    made = command(Config, partial=True)(seen.append)  # type: ignore[arg-type]
    assert made(["--seed=0", "--checkpointing"]) == 0
    assert seen == [{"seed": 0, "checkpointing": True}]
    of_recipes = {"checkpoint_every"}
    assert {it.name for it in made.shown} == Config.__dataclass_fields__.keys() - of_recipes
    assert len([*made.shown]) <= 21  # twenty options, and the recipe


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "no such command: trian (did you mean train?)"),
        (
            ["train", "--batch-sise", "4"],
            "no such option: --batch-sise (did you mean --batch-size?)",
        ),
        (["train", "--steps", "3"], "--steps 3: must be updates and steps from update 0 on"),
        (["train", "--steps", "0:2,5"], "--steps 0:2,5: must be"),
        (["train", "--steps", "0:2"], "--steps 0:2: also give --micro-batch"),
        (["train", "--lr-rule", "sqrt:0"], "--lr-rule sqrt:0: must be none, linear or sqrt, or"),
        (["train", "--updates"], "--updates: needs a value (see --help)"),
        (["train", "one.py", "two.py"], "unexpected argument: two.py (see --help)"),
        (["train", "bytes-gtp"], "there is no such file; the embedded recipes are"),
        (["train", "--seed", str(1 << 64)], f"--seed {1 << 64}: must be a whole number, at most"),
        (["train", "--out", "a" * 400], "File name too long"),
        (["report"], "error: give at least one RUN: folders that wholebatch train wrote, and"),
        (["plan", "--gpu-memory", "24"], "must be a size such as 20GiB"),
        (["verify", "nofile.py"], "nofile.py: there is no such file; the embedded recipes are: by"),
        (["verify", "script", "nofile.py"], "nofile.py: there is no such file"),
        (["verify", "loop"], "loop: give one target, after one of the words model, loop, script"),
        (["verify", "one.py", "two.py"], "one.py two.py: give one target, after one of the words"),
        (["recipes", "--fit"], "no such option: --fit (see --help)"),
    ],
)
def test_a_wrong_line_is_told(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
