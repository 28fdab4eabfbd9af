"""Settings: from the first place that says them, refused with what is allowed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.helpers import environment_of
from wholebatch.cli import main
from wholebatch.cli.command_options import command
from wholebatch.cli.run_settings import (
    Config,
    Given,
    check,
    config_text,
    read_config,
    refuse_idle,
    resolve,
)
from wholebatch.cli.train_command import batch_text
from wholebatch.errors import OptionError, StateError


def test_the_command_line_wins_over_the_recipe_and_that_over_the_default() -> None:
    config = resolve(
        Given(batch_size=8, micro_batch=" 3 "),
        {"batch_size": 64, "steps": 7, "precision": "fp32"},
        stored=None,
    )
    assert (config.batch_size, config.micro_batch, config.steps) == (8, 3, 7)
    assert (config.precision, config.seed, config.clip_norm) == ("full", 0, None)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("micro_batch", "auto", "auto"),
        ("micro_batch", "16", 16),
        ("micro_batch", 16, 16),
        ("micro_batch", "4096 tokens", "4096 tokens"),
        ("micro_batch", "4096tokens", "4096 tokens"),
        ("precision", "bf16-pure", "bf16-pure"),
        ("clip_norm", 1, 1.0),
        ("seed", 0, 0),
        ("steps", None, None),
    ],
)
def test_what_is_allowed(name: str, value: Any, expected: Any) -> None:
    found = check(name, value, "--x")
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("batch_size", 0, "--x 0: must be a whole number, at least 1"),
        ("batch_size", 2.5, "whole number"),
        ("steps", True, "whole number"),
        ("seed", -1, "at least 0"),
        ("micro_batch", "0", 'must be "auto", a number of samples, or a budget'),
        ("micro_batch", "0 tokens", "budget"),
        ("micro_batch", "-4", "budget"),
        ("micro_batch", "a few", "--x a few: must be"),
        ("precision", "int4", "must be one of full, fp32, bf16, fp16, fp8, bf16-pure"),
        ("clip_norm", 0.0, "must be a number above 0"),
        ("clip_norm", float("nan"), "above 0"),
        ("lr", float("inf"), "above 0"),
    ],
)
def test_what_is_refused(name: str, value: Any, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        check(name, value, "--x")
    assert says in str(caught.value)


def test_a_project_of_a_manifest_can_be_left_out() -> None:
    assert resolve(Given(wandb="mine"), {}, stored=None).wandb == "mine"
    assert resolve(Given(wandb="off"), {}, stored=None).wandb is None


def test_a_bad_default_is_told_as_the_recipe_s() -> None:
    with pytest.raises(OptionError, match=r"the recipe's defaults\['steps'\] 0: must be"):
        resolve(Given(), {"steps": 0}, stored=None)


def test_a_stored_run_may_get_longer_but_not_another(tmp_path: Path) -> None:
    stored = {
        "batch_size": 8,
        "micro_batch": 4,
        "steps": 10,
        "precision": "full",
        "clip_norm": None,
        "lr": None,
        "seed": 3,
        "checkpoint_every": 5,
    }
    assert resolve(Given(), {"batch_size": 99}, stored=stored).batch_size == 8
    assert resolve(Given(steps=20, batch_size=8), {}, stored=stored).steps == 20
    assert resolve(Given(precision="fp32"), {}, stored=stored).precision == "full"
    for given, flag in (
        (Given(batch_size=9), "--batch-size 9: the run that --resume continues has 8"),
        (Given(seed=4), "--seed 4"),
        (Given(micro_batch="auto"), "--micro-batch auto"),
        (Given(lr=0.1), "--lr 0.1"),
    ):
        with pytest.raises(OptionError, match=flag):
            resolve(given, {}, stored=stored)


def test_config_is_written_and_read(tmp_path: Path) -> None:
    config = resolve(Given(micro_batch="512 tokens"), {}, stored=None)
    assert config.tokens == 512
    path = tmp_path / "config.json"
    path.write_text(config_text(config, recipe="x.py", digest="ab", about={"torch": "2"}))
    stored = read_config(path)
    assert stored["recipe"] == "x.py"
    assert resolve(Given(), {}, stored=stored["settings"]) == config


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"recipe": "x", "settings": {}}', "\x00"])
def test_a_damaged_config_is_one_clear_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(StateError, match=r"config.json is damaged"):
        read_config(path)


@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"),
    [
        ([8] * 8, 1, "8 × 8 × 1 rank = 64 samples"),
        ([12] * 5 + [4], 1, "(12 × 5 + 4) × 1 rank = 64 samples"),
        ([64], 1, "64 × 1 × 1 rank = 64 samples"),
        ([8] * 4, 2, "8 × 4 × 2 ranks = 64 samples"),
        ([3, 5, 5], 1, "(3 × 1 + 5 × 2) × 1 rank = 13 samples"),
    ],
)
def test_arithmetic_of_the_batch(sizes: list[int], ranks: int, expected: str) -> None:
    config = resolve(Given(), {}, stored=None)
    assert batch_text([sizes] * ranks, config, ranks=ranks).startswith(expected)


def test_config_is_readable_by_people(tmp_path: Path) -> None:
    text = config_text(resolve(Given(), {}, stored=None), recipe="r", digest="d", about={})
    assert text.endswith("}\n")
    assert json.loads(text)["settings"]["micro_batch"] == "auto"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--clip-norm", "abc"], "--clip-norm abc: must be a number (see --help)"),
        (["--steps=1.5"], "--steps 1.5: must be a whole number (see --help)"),
        (["--seed", str(1 << 64)], f"--seed {1 << 64}: must be a whole number below 2**63"),
    ],
)
def test_what_is_not_a_number_is_told_with_what_was_given(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments]) == 2
    assert capsys.readouterr().err == f"error: {said}\n"


@pytest.mark.parametrize(
    "arguments",
    [["train", "--out", ""], ["train", "--from", ""], ["lint", ""]],
)
def test_an_empty_path_is_not_the_folder_one_is_in(
    arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert ' "": is empty; give a value' in capfd.readouterr().err


def test_ctrl_c_is_told(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("wholebatch.cli.scale_command.scaling.solve", lambda **_: interrupted())
    assert main(["scale", "--batch-size", "8", "--micro-batch", "2"]) == 130
    assert capfd.readouterr().err == "stopped\n"


@pytest.mark.parametrize(("typed", "meant"), [("digit-cnn", "digits-cnn"), ("mine", "mine.py")])
def test_what_was_meant_is_asked(
    typed: str,
    meant: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    assert main(["train", typed]) == 2
    assert f"(did you mean {meant}?)" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["train", "verify", "tune", "plan"])
def test_an_empty_recipe_is_not_the_default(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, " "]) == 2
    said = capsys.readouterr().err
    assert (
        said == "error: recipe ' ' is empty; give a Python file or one of: bytes-gpt, digits-cnn\n"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "--zero", "2"], "--zero 2: belongs to --parallel deepspeed"),
        (["train", "--parallel", "pipeline", "--zero", "1"], "--parallel deepspeed"),
        (["train", "--schedule", "gpipe"], "--schedule gpipe: belongs to --parallel pipeline"),
        (["train", "--base-batch", "8"], "it belongs to --lr-rule, --betas or"),
        (["train", "--resume", "--fit"], "--fit with --resume: a run goes on with its own"),
        (["verify", "--ddp"], "--ddp: belongs to torchrun"),
        (["verify", "a.py:f", "--batch-size", "8"], "--batch-size: belongs to a recipe"),
        (["verify", "a.py:f", "--no-float64"], "--no-float64: belongs to a recipe"),
        (["verify", "a.py:f", "--batchnorm", "freeze"], "--batchnorm: belongs to"),
    ],
)
def test_an_option_without_its_partner_is_refused(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_what_a_pipeline_does_not_have_is_refused_where_it_was_typed() -> None:
    config = resolve(Given(execute="graph", noise=4), {}, stored=None)
    refuse_idle((), config, parallel="pipeline")  # the recipe's own defaults may say it
    refuse_idle(("execute", "noise"), config, parallel="ddp")
    for name, says in (("execute", "--execute graph with"), ("noise", "--noise 4 with")):
        with pytest.raises(OptionError, match=says):
            refuse_idle((name,), config, parallel="pipeline")


def test_a_base_batch_with_something_that_follows_it() -> None:
    for rule in (Given(base_batch=8, lr_rule="sqrt"), Given(base_batch=8, betas="beta2")):
        refuse_idle(("base_batch",), resolve(rule, {}, stored=None), parallel="ddp")


def test_help_needs_no_torch() -> None:
    code = "import sys, wholebatch.cli.app; print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=environment_of(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "False\n"


def test_every_option_of_train_is_a_field_and_none_is_filled_in() -> None:
    """The command gets what was typed, a 0 too, and knows what was not."""
    seen: list[Given] = []
    made = command(Config, partial=True)(seen.append)
    assert made(["--zero", "0", "--seed=0", "--fit"]) == 0
    assert seen == [{"zero": 0, "seed": 0, "fit": True}]
    assert {one.name for one in made.shown} == Config.__dataclass_fields__.keys() - {
        "batch_schedule"
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian"], "no such command: trian (did you mean train?)"),
        (["train", "--batch-sise", "4"], "no such option: --batch-sise (did you mean --batch-size"),
        (["train", "--steps"], "--steps: needs a value (see --help)"),
        (["train", "one.py", "two.py"], "two.py: unexpected argument (see --help)"),
        (["report"], "RUN...: is missing: Folders of runs."),
        (["completion"], "SHELL: is missing: bash, zsh or fish."),
        (["train", "bytes-gtp"], "there is no such file (did you mean bytes-gpt?)"),
        (["recipes", "--fit"], "no such option: --fit (see --help)"),
    ],
)
def test_a_wrong_line_is_told_with_what_was_meant(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err
