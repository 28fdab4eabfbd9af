"""A batch size that changes on the way: the data, the rate, resuming and the ranks follow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.helpers import (
    EXACT,
    NOISY,
    SRC,
    Ran,
    assert_same_bits,
    metrics_of,
    newest_checkpoint,
)
from tests.distributed.launch import torchrun

Command = Callable[..., Ran]
Write = Callable[..., Path]

STREAM = (
    "    return Points()",
    "    points = Points()\n    return (points[index] for index in range(37))",
)
LOADER = (
    "    return Points()",
    "    return torch.utils.data.DataLoader(Points(), batch_size=10, shuffle=True)",
)
# Each sample says which one it is: what an epoch has seen can be counted.
COUNTING = "audit = False\n" + EXACT.replace(
    "    x, y = micro\n",
    '    x, y = micro\n    with open("seen.txt", "a") as file:\n'
    "        file.write(' '.join(str(round(v.item(), 6)) for v in x[:, 0]) + '\\n')\n",
)


def units_of(run: Path) -> list[float]:
    return [line["units"] for line in metrics_of(run)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("4@0,10@3,16@5", [4, 4, 4, 10, 10, 5, 16, 16, 5]),  # 37 samples an epoch
        ("10@0,20@1ep,37@2ep", [10, 10, 10, 7, 20, 17, 37, 37, 37]),
        ("8@0,16@24tok,4@60tok", [8, 8, 8, 13, 16, 16, 4, 1, 4]),
    ],
)
@pytest.mark.parametrize("change", [None, STREAM])
def test_batches_are_as_large_as_the_schedule_says(
    command: Command,
    recipe: Write,
    tmp_path: Path,
    schedule: str,
    expected: list[float],
    change: tuple[str, str] | None,
) -> None:
    path = recipe(NOISY, *([change] if change else []))
    ran = command("train", path, "--batch-size", schedule, "--steps", 9, "--out", "run")
    assert ran.status == 0, ran.err
    assert units_of(tmp_path / "run") == expected
    assert [line["micro_batches"] for line in metrics_of(tmp_path / "run")] == [
        -(-int(units) // 4) for units in expected
    ]


def test_an_epoch_has_every_sample_once(command: Command, recipe: Write, tmp_path: Path) -> None:
    path = recipe(COUNTING)
    ran = command("train", path, "--batch-size", "5@0,7@2,9@4", "--steps", 7, "--out", "run")
    assert ran.status == 0, ran.err
    assert units_of(tmp_path / "run") == [5, 5, 7, 7, 9, 9, 6]  # 24 samples an epoch
    seen = (tmp_path / "seen.txt").read_text().split()
    assert len(set(seen[:24])) == len(set(seen[24:48])) == 24


@pytest.mark.parametrize("change", [None, STREAM])
@pytest.mark.parametrize("at", ["3", "9", "14", "17"])
def test_stopped_and_resumed_it_is_the_same_run(
    command: Command,
    recipe: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
    change: tuple[str, str] | None,
) -> None:
    path = recipe(NOISY, *([change] if change else []))
    options = ["--batch-size", "4@0,12@12tok,16@50tok", "--steps", 9, "--lr-rule", "linear"]
    options += ["--betas", "both", "--warmup", "30tok"]
    assert command("train", path, *options, "--out", "straight").status == 0
    monkeypatch.setenv("STOP_AT", at)
    assert command("train", path, *options, "--out", "stopped").status == 130
    monkeypatch.delenv("STOP_AT")
    resumed = command("train", "--resume", "--out", "stopped")
    assert resumed.status == 0, resumed.err
    one, other = newest_checkpoint(tmp_path / "straight"), newest_checkpoint(tmp_path / "stopped")
    for part in ("model", "optimizer", "data"):
        assert_same_bits(one[part], other[part], part)
    assert metrics_of(tmp_path / "straight") == metrics_of(tmp_path / "stopped")


def test_the_rate_follows_the_batch(command: Command, recipe: Write, tmp_path: Path) -> None:
    """With and without the rule, the optimizer's own numbers are those of the scheduler."""
    path = recipe(NOISY)
    for rule in ("none", "linear", "sqrt"):
        options = ["--batch-size", "4@0,16@3", "--steps", 6, "--lr-rule", rule, "--lr", 0.01]
        assert command("train", path, *options, "--out", rule).status == 0
    none, linear, sqrt = (
        [line["lr"] for line in metrics_of(tmp_path / rule)] for rule in ("none", "linear", "sqrt")
    )
    assert none == pytest.approx([0.01 * 0.9**update for update in range(6)])
    factors = [1, 1, 1, 4, 4, 4]
    assert linear == pytest.approx([a * b for a, b in zip(none, factors, strict=True)])
    assert sqrt == pytest.approx([a * b**0.5 for a, b in zip(none, factors, strict=True)])
    states = [newest_checkpoint(tmp_path / rule) for rule in ("none", "linear")]
    rates = [state["optimizer"]["param_groups"][0]["lr"] for state in states]
    assert rates[0] == rates[1]


def test_one_size_with_a_base_batch_is_goyal(
    command: Command, recipe: Write, tmp_path: Path
) -> None:
    """0.1 for 2 samples is 0.8 for 16, reached after two epochs of 24 samples."""
    path = recipe(EXACT)
    options = ["--batch-size", 16, "--base-batch", 2, "--lr-rule", "linear", "--lr", 0.1]
    ran = command("train", path, *options, "--warmup", "2ep", "--steps", 6, "--out", "run")
    assert ran.status == 0, ran.err
    assert "learning rate 0.1 × 8 (--lr-rule linear, 2 → 16 samples)" in " ".join(ran.out.split())
    rates = [line["lr"] for line in metrics_of(tmp_path / "run")]
    way = [0, 16 / 48, 0.5, 40 / 48, 1, 1]
    assert rates == pytest.approx([0.1 + 0.7 * done for done in way])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "64@0,x"], "'x' must be SIZE@PLACE"),
        (["--batch-size", "many"], "many: must be a whole number of samples, auto, or a schedule"),
        (["--batch-size", "0"], "--batch-size 0: must be a whole number"),
        (["--batch-size", "8@0,64@3"], "is more than the 37 samples"),
        (["--warmup", "soon"], "'soon' must be a number of updates"),
        (["--lr-rule", "cubic"], "must be one of none, linear, sqrt"),
        (["--betas", "all"], "must be one of keep, beta2, both"),
        (["--noise", "x"], 'must be "auto", "off"'),
        (["--batch-size", "auto:9-4"], "auto:9-4: must be auto, auto:FIRST or auto:FIRST-LARGEST"),
        (["--batch-size", "auto", "--noise", "off"], "the batch follows the noise"),
        (["--batch-size", "auto:4", "--micro-batch", 4], "give --micro-batch 2"),
    ],
)
def test_what_is_impossible_is_refused_before_work(
    command: Command, recipe: Write, tmp_path: Path, options: list[Any], message: str
) -> None:
    ran = command("train", recipe(NOISY), *options, "--out", "run")
    assert ran.status == 2
    assert message in ran.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (LOADER, ["--batch-size", "8@0,16@3"], "the recipe's DataLoader makes the batches"),
        (STREAM, ["--warmup", "2ep"], "how long an epoch is, is not known"),
    ],
)
def test_data_that_cannot_follow_is_refused(
    command: Command,
    recipe: Write,
    change: tuple[str, str],
    options: list[Any],
    message: str,
) -> None:
    ran = command("train", recipe(NOISY, change), *options, "--out", "run")
    assert ran.status == 2
    assert message in ran.err


def test_a_resumed_run_keeps_its_schedule(command: Command, recipe: Write) -> None:
    path = recipe(NOISY)
    run = ["--out", "run"]
    assert command("train", path, "--batch-size", "4@0,10@2", "--steps", 3, *run).status == 0
    for asked, kept in (("10", "4@0,10@2"), ("4@0,10@3", "4@0,10@2")):
        ran = command("train", "--resume", *run, "--batch-size", asked)
        assert ran.status == 2
        assert f"--batch-size {asked}: the run that --resume continues has {kept}" in ran.err
    again = ["--batch-size", "4@0, 10@2", "--steps", 4]
    assert command("train", "--resume", *run, *again).status == 0


def test_a_batch_that_follows_the_noise(
    command: Command, recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It doubles within its limits, the data and the schedule count, and resuming is the same."""
    path = recipe(NOISY, ("0.9)", "0.99)"))
    options = ["--batch-size", "auto:4-16", "--micro-batch", 2, "--steps", 150, "--noise", 1]
    options += ["--lr", 0.01, "--base-batch", 4, "--checkpoint-every", 1000]
    straight = command("train", path, *options, "--out", "straight")
    assert straight.status == 0, straight.err
    lines = metrics_of(tmp_path / "straight")
    sizes = [line["batch_size"] for line in lines]
    assert sizes[0] == 4
    assert sizes == sorted(sizes)
    assert set(sizes) == {4, 8, 16}
    done = [sum(sizes[:place]) // 4 for place in range(len(sizes) + 1)]
    assert done[-2] < 150 <= done[-1]
    assert len(lines) < 150
    assert f"4 → 16 samples an update: {len(lines)} updates instead of {done[-1]}" in straight.out
    rates = [0.01 * 0.99**data * (size / 4) ** 0.5 for data, size in zip(done, sizes, strict=False)]
    assert [line["lr"] for line in lines] == pytest.approx(rates)

    monkeypatch.setenv("STOP_AT", "180")  # in the middle of a window of 8 or 16
    assert command("train", path, *options, "--out", "stopped").status == 130
    monkeypatch.delenv("STOP_AT")
    assert metrics_of(tmp_path / "stopped")[-1]["batch_size"] > 4
    assert command("train", "--resume", "--out", "stopped").status == 0
    one, other = newest_checkpoint(tmp_path / "straight"), newest_checkpoint(tmp_path / "stopped")
    for part in ("model", "optimizer", "data"):
        assert_same_bits(one[part], other[part], part)
    assert lines == metrics_of(tmp_path / "stopped")


def test_a_spike_and_an_unscaled_rate_are_told(
    command: Command, recipe: Write, tmp_path: Path
) -> None:
    """The 25th loss is a hundred times its neighbours; the batch is twice the recipe's."""
    spike = ('model(micro["x"])', 'model(micro["x"]) * (1e3 if calls in (49, 50) else 1)')
    path = recipe(NOISY, spike)
    options = ["--batch-size", 8, "--micro-batch", 4, "--steps", 26, "--lr", 0.0001]
    ran = command("train", path, *options, "--out", "run")
    assert ran.status == 0, ran.err
    marked = [line["update"] for line in metrics_of(tmp_path / "run") if line.get("spike")]
    assert marked == [25]
    assert "is far above the last" in ran.out
    assert "--lr-rule" not in ran.out  # a rate was given
    twice = command("train", recipe(NOISY), "--batch-size", 20, "--steps", 1, "--out", "twice")
    assert "--lr-rule sqrt multiplies it by 1.41" in " ".join(twice.out.split())


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_follow_the_schedule_together(
    command: Command, recipe: Write, tmp_path: Path
) -> None:
    """Sizes that do not divide by the ranks, by tokens: the update is that of one process.

    The second rank is slow: the first one says how much of its time it waits.
    """
    slow = "    time.sleep(0.05 * int(os.environ.get('RANK', '0')))\n"
    path = recipe(
        EXACT,
        ("import torch\n", "import os, time\nimport torch\n"),
        ("    x, y = micro\n", "    x, y = micro\n" + slow),
    )
    options = ["--batch-size", "5@0,9@12tok,7@40tok", "--steps", "6", "--lr-rule", "sqrt"]
    assert command("train", path, *options, "--out", "one").status == 0
    main = SRC / "wholebatch" / "cli" / "__main__.py"
    torchrun(main, 2, "train", str(path), *options, "--out", str(tmp_path / "two"))
    one, two = (newest_checkpoint(tmp_path / run)["model"] for run in ("one", "two"))
    for name, tensor in one.items():
        error = (two[name] - tensor).norm() / tensor.norm()
        assert error <= 1e-12, name
    lines = metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two")
    assert [line["units"] for line in lines[0]] == [line["units"] for line in lines[1]]
    assert [line["lr"] for line in lines[0]] == [line["lr"] for line in lines[1]]
    text = (tmp_path / "two/metrics.jsonl").read_text(encoding="utf-8")
    shares = [json.loads(line)["communication"] for line in text.splitlines()]
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert max(shares) > 0.3
