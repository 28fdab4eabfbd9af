"""`wholebatch report`: one page for one or more runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.helpers import EXACT, Ran
from wholebatch.cli.metrics import Metrics

Command = Callable[..., Ran]
Write = Callable[..., Path]


@pytest.fixture
def runs(command: Command, recipe: Write, tmp_path: Path) -> Path:
    validated = EXACT + "\ndef validation():\n    return data()\n"
    for name, micro in (("first", 4), ("<b>second", 5)):
        path = recipe(validated)
        ran = command("train", path, "--out", name, "--micro-batch", micro, "--updates", 3)
        assert ran.status == 0, ran.err
    return tmp_path


def test_page_has_plots_settings_and_verdicts(command: Command, runs: Path) -> None:
    verdict = {"line": "same update: 0 off", "same": True, "of_samples": 256, "deep": [1]}
    verdict |= verdict_of(runs / "first")
    (runs / "verdict.json").write_text(json.dumps(verdict))
    ran = command("report", "first", "<b>second", "verdict.json")
    assert ran.status == 0, ran.err
    assert ran.out == "page: report.html\n"
    text = (runs / "report.html").read_text(encoding="utf-8")
    body = re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    assert "<title>mine, 2 runs and a verdict · wholebatch</title>" in body
    for title in ("Loss", "Throughput", "Peak memory", "Gradient norm"):
        assert f"<h3>{title}</h3>" in body
    assert "&lt;b&gt;second" in body  # a name is not markup
    assert "<b>second" not in text
    differs = re.findall(r'<tr class="differs"><th>([\w ]+)</th>', body)
    assert differs == ["micro batch"]
    assert "<th>micro-batches in the first update</th><td>3</td><td>2</td>" in body
    assert re.search(r"<th>began</th><td>\d{4}-\d\d-\d\d \d\d:\d\d</td>", body)
    assert "<noscript>" in body
    assert "Verdict: verdict.json" in body
    assert '<span class="mark right">✓</span>same update: 0 off</p>' in body
    places = [
        body.index(it) for it in ("same update: 0 off", "undivided", "<h3>Loss", "<h2>Results")
    ]
    assert body.count("same update: 0 off</p>") == 2  # on the card of each run of this recipe
    assert places == sorted(places)  # the verdict, memory and time, plots, tables
    assert re.search(
        r"<dt>memory</dt><dd>[\d.]+ KiB; undivided, the batch would need [\d.]+ KiB", body
    )
    assert re.search(r"<dt>time</dt><dd>0:0\d for 3 of 3 updates</dd>", body)
    assert "<th>samples in the batch</th><td>256</td>" in body
    assert "<th>same</th>" not in body
    [plots] = re.findall(r"const plots = (.*);\n", text)
    curves = {plot["title"]: plot["traces"] for plot in json.loads(plots)}
    lines = (runs / "first/metrics.jsonl").read_text().splitlines()
    assert curves["Loss"][0]["y"] == [json.loads(line)["loss"] for line in lines]
    assert [trace["name"] for trace in curves["Loss"]][:2] == ["first", "first, held out"]
    assert curves["Loss"][0]["x"] == [1, 2, 3]
    assert curves["Loss"][0]["seen"] == [10, 20, 24]  # units
    names = ["first", "first, undivided", "<b>second", "<b>second, undivided"]
    assert [trace["name"] for trace in curves["Peak memory"]] == names
    assert "http:" not in body  # it refers to nothing outside
    assert len(text) < 100_000


def verdict_of(run: Path, **other: object) -> dict[str, object]:
    """The keys by which `verify --json` tells what its verdict is of."""
    config = json.loads((run / "config.json").read_text())
    names = {"recipe": config["recipe"], "recipe_sha256": config["recipe_sha256"]}
    return {**names, "batchnorm": "exact", "precision": "full", **other}


@pytest.mark.parametrize(
    "other", [{"recipe_sha256": "0"}, {"batchnorm": "freeze"}, {"precision": "bf16"}, None]
)
def test_a_verdict_of_another_file_is_no_green_tick_above_a_run(
    command: Command, runs: Path, other: dict[str, object] | None
) -> None:
    about = {} if other is None else verdict_of(runs / "first", **other)  # a loop's has none
    (runs / "right.json").write_text(json.dumps({"line": "same: right.py", "same": True, **about}))
    assert command("report", "first", "right.json").status == 0
    body = (runs / "report.html").read_text(encoding="utf-8").partition("<script>")[0]
    above, _, below = body.partition("<h2>Results")
    assert "Not proven on this page" in above
    assert "✓" not in above
    assert "same: right.py" not in above
    assert "it says nothing of them" in below


def test_verify_writes_what_its_verdict_is_of(
    command: Command, recipe: Write, tmp_path: Path
) -> None:
    path = recipe(EXACT)
    ran = command("verify", path, "--json")
    (tmp_path / "verify.json").write_text(ran.out)
    assert command("train", path, "--updates", 1, "--out", "run").status == 0
    assert command("report", "run", "verify.json").status == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<span class="mark right">✓</span>same update' in text
    assert "Not proven" not in text


def tuned(rate: float, ranks: int = 1, **more: object) -> str:
    trial = {"micro_batch": 4, "precision": "full", "checkpointing": False, "execute": "eager"}
    trials = [
        {**trial, "units_per_second": rate, "peak": 2**20, "reductions": 1},
        {**trial, "units_per_second": rate / 2, "peak": None, "reductions": 3},
    ]
    about = {"unit": "rows", "device": "cpu", "recipe": "mine.py", "ranks": ranks, **more}
    settings = {"settings": {"batch_size": 12}}
    return json.dumps({"kind": "wholebatch tune", "trials": trials, **about, **settings})


def test_two_files_of_tune_are_shown_side_by_side(command: Command, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(tuned(1000.0))
    (tmp_path / "b.json").write_text(tuned(1250.0, ranks=2))
    ran = command("report", "a.json", "b.json")
    assert ran.status == 0, ran.err
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<title>Settings, measured · wholebatch</title>" in text
    row = "<td>micro-batch 4, full, eager</td><td>1.00k</td><td>1.00 MiB</td>"
    assert f"{row}<td>1.25k (+25%)</td><td>1.00 MiB (+0%)</td>" in text
    assert "all-reduced in every micro-batch</td><td>500</td><td></td>" in text
    assert "2: b.json: mine.py, batch of 12 on 2 ranks, cpu" in text
    assert command("report", "a.json").status == 0


def test_a_file_that_tune_wrote_is_read(command: Command, recipe: Write, tmp_path: Path) -> None:
    ran = command("tune", recipe(EXACT), "--micro-batch", "10,5", "--seconds", 20, "--json")
    assert ran.status == 0, ran.err
    (tmp_path / "tune.json").write_text(ran.out)
    assert command("report", "tune.json").status == 0
    assert "micro-batch 5, full, eager" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "x: cannot be read: No such file or directory"),
        (lambda folder: (folder / "x").mkdir(), "x: has no config.json; give the folder of a run"),
        (lambda folder: (folder / "x").write_text("{"), "x: is not JSON"),
        (lambda folder: (folder / "x").write_text("[]"), "x: is not a file of wholebatch verify"),
        (lambda folder: (folder / "x").write_text('{"a": 1}'), "--json or wholebatch tune --json"),
    ],
)
def test_what_is_no_run_is_refused(
    command: Command, tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    make(tmp_path)
    ran = command("report", "x")
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    assert message in ran.err


def test_a_line_that_is_no_record_is_told(command: Command, runs: Path) -> None:
    metrics = runs / "first/metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"window": 4, "lo')  # being written now
    assert command("report", "first").status == 0
    metrics.write_text(metrics.read_text() + "\n")
    ran = command("report", "first")
    assert "metrics.jsonl: line 4 is not the record of a window" in ran.err


def test_metrics_beyond_the_checkpoint_are_cut_off(tmp_path: Path) -> None:
    record = {"update": 1, "loss": 1.5, "lr": 0.1, "skipped": None}
    metrics = Metrics(tmp_path, windows=0, wandb=None, settings={})
    for window in (1, 2, 3):
        metrics.write({"window": window, **record})
    metrics.close()
    resumed = Metrics(tmp_path, windows=2, wandb=None, settings={})
    resumed.write({"window": 3, **record, "loss": float("nan")})
    resumed.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["window"] for line in lines] == [1, 2, 3]
    assert lines[-1]["loss"] is None
    assert resumed.first is not None
    assert resumed.first["window"] == 1
    assert list((tmp_path / "tensorboard").glob("events.*"))


@pytest.mark.slow
def test_wandb_offline_and_resumed(
    command: Command, recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    path = recipe(EXACT)
    ran = command("train", path, "--out", "run", "--updates", 2, "--wandb", "project")
    assert ran.status == 0, ran.err
    number = (tmp_path / "run/wandb-id.txt").read_text()
    assert command("train", "--resume", "--out", "run", "--updates", 3).status == 0
    assert (tmp_path / "run/wandb-id.txt").read_text() == number
    assert len(list((tmp_path / "run/wandb").glob(f"offline-run-*-{number}"))) == 2


def test_what_a_run_costs(command: Command, runs: Path) -> None:
    lines = (runs / "first/metrics.jsonl").read_text().splitlines()
    seconds = sum(json.loads(line)["seconds"] for line in lines)
    assert command("report", "first", "--price", 3600).status == 0
    text = (runs / "report.html").read_text(encoding="utf-8")
    assert f"<th>cost</th><td>{seconds:.4g}</td>" in text
    assert f"<th>cost of an epoch</th><td>{seconds:.4g}</td>" in text  # three batches
