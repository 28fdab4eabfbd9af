"""More updates than a run was begun with: the learning-rate schedule goes on as it was made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cli.helpers import NOISY, Ran, metrics_of
from tests.cli.test_resume import assert_same_run
from wholebatch.cli.recipes.recipe import Horizon

Command = Callable[..., Ran]
Write = Callable[..., Path]

PLAIN = (
    "def scheduler(optimizer):\n    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)",
    "",
)
ENDING = {
    "lambda": "LambdaLR(optimizer, lambda update: 1 - 0.9 * update / steps)",
    "cosine": "CosineAnnealingLR(optimizer, steps, eta_min=1e-5)",
    "onecycle": "OneCycleLR(optimizer, max_lr=0.01, total_steps=steps)",
}


def ending(kind: str) -> tuple[str, str]:
    made = f"torch.optim.lr_scheduler.{ENDING[kind]}"
    return PLAIN[0], f"def scheduler(optimizer, steps):\n    return {made}"


def rates(run: Path) -> list[float]:
    return [record["lr"] for record in metrics_of(run)]


@pytest.mark.parametrize("kind", ENDING)
def test_more_updates_keep_the_schedule(
    command: Command, recipe: Write, tmp_path: Path, kind: str
) -> None:
    """The same bits as a run that was begun with that schedule and that many updates."""
    path = recipe(NOISY, ending(kind))
    assert command("train", path, "--out", "first", "--steps", 5).status == 0
    begun = rates(tmp_path / "first")
    more = command("train", "--resume", "--out", "first", "--steps", 9)
    assert more.status == 0, more.err
    assert "note: the learning-rate schedule stays that of 5 updates, after them" in more.out
    assert "; --lr-steps 9 makes it anew" in " ".join(more.out.split())
    straight = ("train", path, "--out", "straight", "--steps", 9, "--lr-steps", 5)
    assert command(*straight).status == 0
    assert rates(tmp_path / "first")[:5] == begun
    assert len(set(rates(tmp_path / "first")[5:])) == 1  # after its end the rate stays
    assert_same_run(tmp_path / "straight", tmp_path / "first")


@pytest.mark.parametrize("kind", ENDING)
def test_a_schedule_that_is_made_anew(
    command: Command, recipe: Write, tmp_path: Path, kind: str
) -> None:
    """From there on the rates are those of a run that was begun with it."""
    path = recipe(NOISY, ending(kind))
    assert command("train", path, "--out", "first", "--steps", 4).status == 0
    again = ("train", "--resume", "--out", "first", "--steps", 8, "--lr-steps", 8)
    ran = command(*again)
    assert ran.status == 0, ran.err
    assert command("train", path, "--out", "straight", "--steps", 8).status == 0
    wanted, found = rates(tmp_path / "straight"), rates(tmp_path / "first")
    assert found[4:] == pytest.approx(wanted[4:], rel=1e-12)
    assert f"note: the schedule is made anew for 8 updates: learning rate {wanted[4]:.3g}" in (
        ran.out
    )
    # And once made, it is the run's own: nothing more is said of it.
    last = command("train", "--resume", "--out", "first", "--steps", 8)
    assert "schedule" not in last.out


def test_made_anew_after_its_end(command: Command, recipe: Write, tmp_path: Path) -> None:
    """The updates beyond the end of the first schedule count in the second."""
    path = recipe(NOISY, ending("lambda"))
    assert command("train", path, "--out", "first", "--steps", 3).status == 0
    assert command("train", "--resume", "--out", "first", "--steps", 6).status == 0
    again = ("train", "--resume", "--out", "first", "--steps", 9, "--lr-steps", 9)
    assert command(*again).status == 0
    assert command("train", path, "--out", "straight", "--steps", 9).status == 0
    wanted, found = rates(tmp_path / "straight"), rates(tmp_path / "first")
    assert found[6:] == pytest.approx(wanted[6:], rel=1e-12)


def test_stopped_and_resumed_without_another_number(
    command: Command, recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe(NOISY, ending("cosine"))
    assert command("train", path, "--out", "straight").status == 0
    monkeypatch.setenv("STOP_AT", "8")
    assert command("train", path, "--out", "stopped").status == 130
    monkeypatch.delenv("STOP_AT")
    resumed = command("train", "--resume", "--out", "stopped")
    assert resumed.status == 0
    assert "schedule" not in resumed.out
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")


def test_fewer_updates_keep_the_schedule_too(
    command: Command, recipe: Write, tmp_path: Path
) -> None:
    path = recipe(NOISY, ending("lambda"))
    assert command("train", path, "--out", "run", "--steps", 8, "--checkpoint-every", 8).status == 0
    assert command("train", path, "--out", "short", "--steps", 3, "--lr-steps", 8).status == 0
    assert rates(tmp_path / "short") == rates(tmp_path / "run")[:3]


def test_where_it_would_do_nothing_it_is_refused(command: Command, recipe: Write) -> None:
    ran = command("train", recipe(NOISY), "--lr-steps", 9, "--out", "run")
    assert ran.status == 2
    assert "--lr-steps 9: the recipe's learning-rate schedule is not made for a number" in ran.err
    ran = command("train", recipe(NOISY), "--lr-steps", 0, "--out", "run")
    assert ran.status == 2
    assert "--lr-steps 0: must be a whole number, at least 1" in ran.err


def test_a_schedule_made_anew_has_no_more_steps_than_it_is_made_for() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    state = {**Horizon(schedule, 10).state_dict(), "last_epoch": 10, "made": 12}
    short = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=4)
    Horizon(short, 4).load_state_dict(state)
    assert short.last_epoch == 4
