"""Warm-up, scaled rates and batches that grow in `wholebatch train`; warnings of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cli.helpers import EXACT, NOISY, Ran, assert_same_bits, metrics_of, newest_checkpoint
from wholebatch.cli.run_watch import RunWatch
from wholebatch.window.window import Step

Command = Callable[..., Ran]
Recipe = Callable[..., Path]


def test_a_scheduler_of_the_recipe_warms_up_itself(command: Command, recipe: Recipe) -> None:
    ran = command("train", recipe(NOISY), "--warmup", 4)
    assert ran.status == 2
    assert "--warmup 4: " in ran.err
    assert "has a scheduler(), which sets the rate; do it there" in ran.err
    steps = ("--micro-batch", 4, "--steps", "0:1,2:2", "--lr-rule", "sqrt")
    assert "--lr-rule with --steps: " in command("train", recipe(NOISY), *steps).err
    assert command("train", recipe(NOISY), *steps[:2], "--lr-rule", "sqrt").status == 0


def test_the_rate_follows_a_batch_that_grows(
    command: Command, recipe: Recipe, tmp_path: Path
) -> None:
    """4, 4, 8, 8, 12 samples, and a rate that was chosen for 16, warmed up over two updates."""
    options = ("--micro-batch", 4, "--steps", "0:1,2:2,4:3", "--updates", 5, "--warmup", 2)
    rule = ("--lr-rule", "linear:16", "--lr", 0.1)
    ran = command("train", recipe(EXACT), *options, *rule, "--out", "run")
    assert ran.status == 0, ran.err
    rates = [record["lr"] for record in metrics_of(tmp_path / "run")]
    assert rates == pytest.approx([0.0125, 0.025, 0.05, 0.05, 0.075])
    assert "at the same learning rate" not in ran.out


def test_the_batch_grows_and_a_resumed_run_is_the_same(
    command: Command, recipe: Recipe, tmp_path: Path
) -> None:
    """Each update is that of an undivided batch of so many samples: 4, 4, 8, 8, and 12."""
    path = recipe(EXACT)
    options = ("--micro-batch", 4, "--steps", "0:1,2:2,4:3")
    ran = command("train", path, *options, "--updates", 5, "--out", "run")
    assert ran.status == 0, ran.err
    assert "steps: 1 from update 0, 2 from update 2, 3 from update 4" in ran.out
    records = metrics_of(tmp_path / "run")
    assert [record["units"] for record in records] == [4, 4, 8, 8, 12]
    assert [record["micro_batches"] for record in records] == [1, 1, 2, 2, 3]
    assert command("train", path, *options, "--updates", 3, "--out", "again").status == 0
    ran = command("train", "--resume", "--out", "again", "--updates", 5)
    assert ran.status == 0, ran.err
    one, other = newest_checkpoint(tmp_path / "run"), newest_checkpoint(tmp_path / "again")
    assert_same_bits(one["model"], other["model"])
    assert command("train", path, *options, "--batch-size", 4).status == 2
    by_hand = _by_hand(path)
    for name, tensor in one["model"].items():
        assert float((tensor - by_hand[name]).norm() / tensor.norm()) <= 1e-12


def _by_hand(path: Path) -> dict[str, torch.Tensor]:
    from wholebatch.cli.recipes.recipe import load_recipe
    from wholebatch.cli.recipes.recipe_batches import seed_generators

    recipe = load_recipe(str(path))
    seed_generators(0)
    batches = recipe.build_batches(4, seed=0)
    model = recipe.build_model()
    optimizer = recipe.build_optimizer(model, lr=None)
    for count in (1, 1, 2, 2, 3):
        parts = [batches.take() for _ in range(count)]
        x, y = (torch.cat(column) for column in zip(*parts, strict=True))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.state_dict()


def test_a_batch_twice_the_recipe_s_is_told(command: Command, recipe: Recipe) -> None:
    path = recipe(EXACT, ('"batch_size": 10', '"batch_size": 8'), ('"micro_batch": 4', '"seed": 0'))
    said = "the batch is 2 times the recipe's 8 at the same learning rate; --lr-rule sqrt"
    assert said in command("train", path, "--batch-size", 16, "--updates", 1).out
    for more in (("--lr", 0.1), ("--lr-rule", "linear")):
        assert said not in command("train", path, "--batch-size", 16, "--updates", 1, *more).out
    assert said not in command("train", path, "--batch-size", 15, "--updates", 1).out
    grows = ("--micro-batch", 4, "--steps", "0:1,2:4", "--updates", 1)
    assert "the batch grows to 2 times the recipe's 8" in command("train", path, *grows).out
    bare = recipe(EXACT, ('"batch_size": 10, "micro_batch": 4', '"seed": 0'), name="bare.py")
    bare.write_text(bare.read_text().replace("24", "64"))
    ran = command("train", bare, "--batch-size", 64, "--updates", 1)
    assert "the batch is 2 times the default 32 at the same learning rate" in ran.out


def test_a_loss_that_is_not_finite_names_options_of_the_command(
    command: Command, recipe: Recipe
) -> None:
    ran = command("train", recipe(EXACT), "--lr", 1e300)
    assert ran.status == 2
    assert "try a lower --lr, a longer --warmup or --clip-norm" in ran.err
    assert "wb.Close" not in ran.err


def step(loss: float = 1.0, grad_norm: float = 1.0, clip: float = 1.0) -> Step:
    return Step(1, loss, 1, grad_norm, 1, seconds=1.0, clip=clip)


def notes_of(losses: list[float]) -> tuple[list[str], str | None]:
    watch = RunWatch()
    notes = [it for loss in losses for it in watch.notes(step(loss))]
    return notes, watch.ending


def test_spikes_are_said_the_first_ones_each() -> None:
    calm = [2.0, 1.9, 1.8, 1.7, 1.6, 1.5]
    notes, ending = notes_of([*calm, 280_000.0, *calm, 29.0, *calm])
    assert [note.partition(":")[0] for note in notes] == ["update 1", "update 1"]
    assert "the loss jumped to 2.8e+05, 1.6e+05 times the running median" in notes[0]
    assert ending is None
    notes, ending = notes_of([*calm, *[50.0, *calm] * 5])
    assert len(notes) == 3
    assert ending == "the loss was above 4 times its running median 5 times"
    assert notes_of([100.0, 1.0, 0.1, 0.01, 0.001])[0] == []  # a loss may fall


def test_a_run_that_ends_diverged_is_said() -> None:
    notes, ending = notes_of([28.8, 20.0, 30.0, 900.0, 1e5, 5.4e6, 1e7, 5.4e8])
    assert notes
    assert ending is not None
    assert ending.startswith("diverged: the last loss, 5.4e+08, is 2.7e+07 times the best, 20")
    notes, _ = notes_of([*[1.0] * 5, *[11.0] * 25])
    assert any("more than ten times its best, 1, for 20 updates" in note for note in notes)
