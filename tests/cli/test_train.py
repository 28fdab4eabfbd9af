"""`wholebatch train` from end to end, in this process: what it does, shows and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.helpers import EXACT, NOISY, Ran, environment_of, metrics_of, newest_checkpoint

Command = Callable[..., Ran]
Write = Callable[..., Path]


def test_a_run_shows_the_arithmetic_and_a_summary_and_writes_everything(
    command: Command, recipe: Write, tmp_path: Path
) -> None:
    ran = command("train", recipe(EXACT), "--out", "here", "--updates", 5)
    assert ran.status == 0, ran.err
    assert "(4 × 2 + 2) × 1 rank = 10 samples an update" in ran.out
    assert "24 samples, 3 batches an epoch" in ran.out
    assert "update 5/5  loss " in ran.out
    assert "points/s" in ran.out
    assert "undivided, the batch would need" in ran.out
    assert "--resume --out here --updates 10" in ran.out
    assert ran.err == ""
    run = tmp_path / "here"
    records = metrics_of(run)
    assert [record["update"] for record in records] == [1, 2, 3, 4, 5]
    # Three batches an epoch, the last one short: 10, 10, 4.
    assert [record["units"] for record in records] == [10, 10, 4, 10, 10]
    assert [record["micro_batches"] for record in records] == [3, 3, 1, 3, 3]
    assert [record["epoch"] for record in records] == [0, 0, 0, 1, 1]
    assert list((run / "tensorboard").glob("events.*"))
    assert json.loads((run / "config.json").read_text())["settings"]["updates"] == 5
    assert newest_checkpoint(run)["ranks"][0]["updates"] == 5


def test_the_update_is_that_of_the_whole_batch(
    command: Command, recipe: Write, tmp_path: Path
) -> None:
    path = recipe(EXACT)
    for micro in (10, 4, 3, 1):
        ran = command("train", path, "--micro-batch", micro, "--out", f"by-{micro}")
        assert ran.status == 0, ran.err
    whole = newest_checkpoint(tmp_path / "by-10")["model"]
    for micro in (4, 3, 1):
        split = newest_checkpoint(tmp_path / f"by-{micro}")["model"]
        for name, weight in whole.items():
            error = (split[name] - weight).norm() / weight.norm()
            assert error <= 1e-12, (micro, name)
    losses = [record["loss"] for record in metrics_of(tmp_path / "by-10")]
    assert [r["loss"] for r in metrics_of(tmp_path / "by-3")] == pytest.approx(losses, rel=1e-12)


def test_micro_batches_by_a_budget_of_tokens(
    command: Command, recipe: Write, tmp_path: Path
) -> None:
    text = EXACT + "\ndef tokens(budget):\n    return wb.tokens(budget, multiple=1)\n"
    ran = command("train", recipe(text), "--micro-batch", "20 tokens", "--out", "here")
    assert ran.status == 0, ran.err
    assert "10 samples an update, in micro-batches of 20 tokens" in ran.out
    assert metrics_of(tmp_path / "here")[0]["micro_batches"] == 3


def test_a_data_loader_gives_whole_batches(command: Command, recipe: Write, tmp_path: Path) -> None:
    path = recipe(
        EXACT,
        ("    return TensorDataset(x, torch.arange(24) % 3)",
         "    return torch.utils.data.DataLoader(\n"
         "        TensorDataset(x, torch.arange(24) % 3), batch_size=7, shuffle=True)"),
        ('"batch_size": 10, ', ""),
    )  # fmt: skip
    ran = command("train", path, "--out", "here")
    assert ran.status == 0, ran.err
    assert "(4 × 1 + 3) × 1 rank = 7 samples" in ran.out
    assert [r["units"] for r in metrics_of(tmp_path / "here")] == [7, 7, 7, 3]
    ran = command("train", path, "--batch-size", 8)
    assert ran.status == 2
    assert ran.err == (
        "error: --batch-size 8: the recipe's DataLoader gives batches of 7; change it there\n"
    )


REFUSED = {
    "no file": (["train", "other.py"], None, "recipe 'other.py': there is no such file"),
    "raises": (["train", "mine.py"], ("calls = 0", "calls = 1 / 0"), "ZeroDivisionError"),
    "model raises": (["train", "mine.py"], ("return nn.Seq", "return nn.Sek"), "in model: model()"),
    "micro-batch": (["train", "mine.py", "--micro-batch", "11"], None, "more than the batch of 10"),
    "batch": (["train", "mine.py", "--batch-size", "99"], None, "more than the 37 samples"),
    "tokens": (
        ["train", "mine.py", "--micro-batch", "2 tokens"],
        None,
        "more than the budget of 2",
    ),
    "resume": (["train", "mine.py", "--resume"], None, "--resume: needs --out"),
    "resume out": (["train", "--resume", "--out", "x"], None, "--resume: there is no run in x"),
    "out is a file": (
        ["train", "mine.py", "--out", "mine.py"],
        None,
        "cannot be written: Not a directory",
    ),
    "out below a file": (["train", "mine.py", "--out", "mine.py/x"], None, "cannot be"),
    "empty data": (["train", "mine.py"], ("return Points()", "return []"), "data() is empty"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_one_clear_line_before_any_work(
    command: Command, recipe: Write, tmp_path: Path, what: str
) -> None:
    arguments, change, expected = REFUSED[what]
    recipe(NOISY, *([change] if change else []))
    before = sorted(tmp_path.rglob("*"))
    ran = command(*arguments)
    assert ran.status == 2
    assert ran.out == "" or what == "tokens"  # that needs the first batch
    assert ran.err.startswith("error: ")
    assert expected in ran.err
    assert ran.err.count("\n") == 1
    left = [
        p for p in sorted(tmp_path.rglob("*")) if p not in before and "__pycache__" not in str(p)
    ]
    assert left in ([], [tmp_path / "runs"]) or what == "tokens"


def test_a_folder_with_a_run_is_not_touched(
    command: Command, recipe: Write, tmp_path: Path
) -> None:
    path = recipe(EXACT)
    assert command("train", path, "--out", "here").status == 0
    before = (tmp_path / "here" / "metrics.jsonl").read_bytes()
    ran = command("train", path, "--out", "here")
    assert ran.status == 2
    assert ran.err == (
        "error: --out here: has a run already; continue it with --resume, or give another --out\n"
    )
    assert (tmp_path / "here" / "metrics.jsonl").read_bytes() == before
    assert command("train", path, "--out", "other").status == 0


def test_a_run_that_failed_in_its_first_update_can_begin_again(
    command: Command, recipe: Write
) -> None:
    path = recipe(EXACT, ("return wb.cross_entropy(model(x), y)", "return model(x).sum()"))
    ran = command("train", path, "--out", "here")
    assert ran.status == 2
    assert ran.err.startswith("error: the loss function returned a bare scalar: is this scalar a")
    recipe(EXACT)
    assert command("train", path, "--out", "here").status == 0


def test_an_error_in_the_recipe_s_loss_is_short_and_names_its_line(
    command: Command, recipe: Write
) -> None:
    path = recipe(EXACT, ("    x, y = micro\n", "    x, y = micro\n    y = micro[7]\n"))
    ran = command("train", path)
    assert ran.status == 1
    assert ran.err.startswith("error: IndexError: ")
    assert ran.err.endswith(f", at {path}:20, in loss\n")
    assert ran.err.count("\n") == 1


def test_a_loss_that_is_not_finite_stops_with_its_place(command: Command, recipe: Write) -> None:
    untested = EXACT + "\naudit = False\n"  # the test of the loss may cut out four samples itself
    path = recipe(untested, ("    x, y = micro\n", "    x, y = micro\n    x = x / (len(y) != 4)\n"))
    ran = command("train", path, "--micro-batch", 5, "--updates", 3, "--out", "here")
    assert ran.status == 2  # the third batch of the epoch has four samples
    assert "finite" in ran.err
    assert "are as before this window" in ran.err
    assert ran.err.count("\n") == 1


def test_recipes_lists_them_and_prints_one(command: Command, tmp_path: Path) -> None:
    listed = command("recipes").out
    assert "bytes-gpt" in listed
    assert "digits-cnn" in listed
    source = command("recipes", "bytes-gpt").out
    compile(source, "bytes-gpt", "exec")
    ran = command("recipes", "nope")
    assert (ran.status, ran.err) == (
        2,
        "error: NAME nope: must be one of bytes-gpt, digits-cnn\n",
    )


def test_without_its_library_the_command_says_how_to_get_it() -> None:
    """In a process of its own: modules that are imported twice would be two."""
    code = (
        "import sys; sys.modules['rich'] = sys.modules['rich.console'] = None\n"
        "from wholebatch.cli import main; sys.exit(main(['recipes']))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=environment_of(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2
    assert ran.stderr == "error: the command line needs rich: pip install 'wholebatch[cli]'\n"


def test_the_validation_loss_is_the_mean_over_all_held_out_samples(
    command: Command, recipe: Write, tmp_path: Path
) -> None:
    change = (
        "def loss(model, micro):",
        "def validation():\n    return data()\n\ndef loss(model, micro):",
    )
    path = recipe(EXACT, change)
    found = {}
    for micro in (10, 3):
        ran = command("train", path, "--micro-batch", micro, "--updates", 1, "--out", f"by-{micro}")
        assert ran.status == 0, ran.err
        found[micro] = metrics_of(tmp_path / f"by-{micro}")[-1]["validation_loss"]
    assert found[3] == pytest.approx(found[10], rel=1e-12)


@pytest.mark.parametrize(
    ("options", "said", "warned"),
    [
        (("--batchnorm", "freeze"), "those of the whole batch, with BatchNorm frozen, if its", ""),
        (
            ("--batchnorm", "allow"),
            "not those of the whole batch: BatchNorm saw 4 samples at a time",
            "BatchNorm sees 4 samples at a time, so the updates are not those of the whole batch, "
            "and fewer than 8 make its statistics noisy",
        ),
        (("--batchnorm", "allow", "--micro-batch", 10), "those of the whole batch, which was", ""),
    ],
)
def test_the_summary_and_the_page_say_what_the_updates_are(
    command: Command,
    recipe: Write,
    tmp_path: Path,
    options: tuple[object, ...],
    said: str,
    warned: str,
) -> None:
    path = recipe(NOISY, ("nn.Dropout(0.3)", "nn.BatchNorm1d(16)"))
    ran = command("train", path, *options, "--updates", 2, "--out", "run")
    assert ran.status == 0, ran.err
    assert f"updates        {said}" in ran.out or f"updates      {said}" in ran.out
    assert warned in ran.out
    assert ("note: --batchnorm allow" in ran.out) == bool(warned)
    assert command("report", "run").status == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    whole = "<dt>updates</dt><dd>those of the whole batch"
    assert (whole in page) == said.startswith("those")
    assert ("<dt>updates</dt><dd>not those of the whole batch" in page) == said.startswith("not")


def test_a_run_knows_where_it_comes_from(command: Command, recipe: Write, tmp_path: Path) -> None:
    path = recipe(EXACT)
    for words in (["init", "-q"], ["add", "mine.py"], ["commit", "-qm", "one"]):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True)
    assert command("train", path, "--updates", 2, "--out", "run").status == 0
    config = tmp_path / "run/config.json"
    stored = json.loads(config.read_text())
    assert len(stored["git"]["commit"]) == 40
    assert stored["git"]["dirty"]  # runs/ is not ignored
    assert {"wholebatch", "torch", "python"} <= stored["versions"].keys()
    assert len(stored["data_sha256"]) == 64
    stored["data_sha256"] = "0"
    config.write_text(json.dumps(stored))
    ran = command("train", "--resume", "--out", "run", "--updates", 3)
    assert ran.status == 0, ran.err
    assert "note: the data have changed since this run began" in ran.out


def test_lr_seed_and_clip_norm_are_used(command: Command, recipe: Write, tmp_path: Path) -> None:
    path = recipe(EXACT)
    command("train", path, "--out", "a", "--lr", 0.5, "--clip-norm", 0.01)
    records = metrics_of(tmp_path / "a")
    assert {record["lr"] for record in records} == {0.5}
    assert records[0]["clip"] == pytest.approx(0.01 / records[0]["grad_norm"], rel=1e-4)
    command("train", path, "--out", "b", "--seed", 1)
    assert metrics_of(tmp_path / "b")[0]["loss"] != records[0]["loss"]
