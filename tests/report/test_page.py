"""The page: every section has what was read, nothing comes from elsewhere, plotly takes it all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.report import samples
from wholebatch.cli.report.html_page import SERIES, Chart, HtmlPage, Section, render, write_page
from wholebatch.cli.report.html_report import make_page
from wholebatch.cli.report.page_sources import read_sources
from wholebatch.cli.report.training_section import MOST_POINTS, thinned
from wholebatch.errors import MissingExtraError, OptionError, StateError

ASSETS = Path(__file__).parents[2] / "src/wholebatch/cli/report/assets"


@pytest.fixture
def page(tmp_path: Path) -> HtmlPage:
    return make_page(read_sources(samples.write_all(tmp_path)))


@pytest.fixture
def text(page: HtmlPage, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file without the plotting library, whose five million characters say nothing here."""
    monkeypatch.setattr("wholebatch.cli.report.html_page._plotly", lambda: "/* plotly */")
    return render(page)


def test_sections_are_those_that_have_something_to_say(page: HtmlPage, tmp_path: Path) -> None:
    names = [section.name for section in page.sections]
    assert names == [
        "runs",
        "training",
        "tuning",
        "memory",
        "time",
        "verification",
        "benchmark-of-0",
    ]
    alone = make_page(read_sources([samples.write_run(tmp_path / "alone", windows=3)]))
    assert [section.name for section in alone.sections] == ["runs", "training"]


def resolved(value: Any) -> Any:
    """As the page's script does it, with one colour for all names."""
    if isinstance(value, str):
        return "#123456" if value.startswith("--") else value
    if isinstance(value, dict):
        return {key: resolved(item) for key, item in value.items() if key != "xs"}
    return [resolved(item) for item in value] if isinstance(value, list | tuple) else value


def test_plotly_takes_every_chart(page: HtmlPage) -> None:
    import plotly.graph_objects as go

    assert len(page.charts) >= 12
    for chart in page.charts:
        go.Figure(data=resolved(list(chart.data)), layout=resolved(dict(chart.layout)))
        for trace in chart.data:
            lengths = {len(x) for x in trace.get("xs", {"x": trace.get("x")}).values()}
            assert lengths == {len(trace["y"])}, chart.name


def test_runs_stand_side_by_side_and_differences_are_marked(page: HtmlPage) -> None:
    table = page.sections[0].parts[0]
    rows = {row[0]: row[1:] for row in table.rows}  # type: ignore[union-attr]
    assert table.head == ("", "one", "two")  # type: ignore[union-attr]
    assert rows["learning rate"] == ("0.01", "0.5")
    assert rows["speed (median)"] == ("1.28k bytes/s", "1.28k bytes/s")
    assert rows["peak memory"] == ("1.00 GiB", "–")
    assert rows["verified"] == ("✓ the same update", "–")
    marked = {table.rows[at][0] for at in table.bold}  # type: ignore[union-attr]
    assert marked == {label for label, cells in rows.items() if len(set(cells)) > 1}
    assert {"learning rate", "peak memory"} <= marked
    dashes = [trace["line"]["dash"] for trace in page.charts[0].data]
    assert dashes == ["solid", "dash"]


def test_a_batch_size_that_changes_on_the_way_is_said(tmp_path: Path) -> None:
    from wholebatch.cli.run_folder import arithmetic_of

    run = samples.write_run(tmp_path / "run", windows=3)
    changes = arithmetic_of(24, "8@0,24@3000tok", micro_batch=8, ranks=1)
    (run / "manifest.json").write_text(json.dumps({"arithmetic": changes}), encoding="utf-8")
    rows = {row[0]: row[1] for row in make_page(read_sources([run])).sections[0].parts[0].rows}  # type: ignore[union-attr]
    assert rows["batch"] == "samples by token: 8 from 0, 24 from 3,000; micro-batch 8"


def test_what_was_measured_in_some_windows_only_is_one_curve(tmp_path: Path) -> None:
    """A line through points with gaps between all of them would not be seen."""
    run = samples.write_run(tmp_path / "run", windows=100)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines[::16]:
        scale = 100.0 + line["window"]
        line |= {"noise_scale": scale, "noise_low": 90.0, "noise_high": None, "memory": 3 * 2**20}
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    charts = {chart.name: chart for chart in make_page(read_sources([run])).charts}
    noise = charts["noise"].data[0]
    assert noise["xs"]["window"] == [1, 17, 33, 49, 65, 81, 97]
    assert noise["y"] == [100 + window for window in noise["xs"]["window"]]
    assert noise["mode"] == "lines+markers"
    assert noise["error_y"]["arrayminus"] == [10 + window for window in noise["xs"]["window"]]
    assert set(noise["error_y"]["array"]) == {0.0}  # an interval without an upper end
    assert charts["memory-over-time"].layout["yaxis"]["title"]["text"] == "peak, MiB"
    # 2, 5 and 10 of a decade would not be one tick between 90 and 197.
    assert "dtick" not in charts["noise"].layout["yaxis"]


def test_curves_have_the_numbers_of_the_run(page: HtmlPage) -> None:
    loss = next(chart for chart in page.charts if chart.name == "loss")
    first = loss.data[0]
    assert first["y"][0] == samples.record(1)["loss"]
    assert first["xs"]["window"] == list(range(1, 31))
    assert first["xs"]["bytes seen"][-1] == 30 * 640.0
    assert first["xs"]["minutes of training"][1] == pytest.approx(1.0 / 60)
    memory = next(chart for chart in page.charts if chart.name == "memory-over-time")
    assert [trace["name"] for trace in memory.data] == ["one"]
    assert memory.data[0]["y"][0] == 1.0


def test_a_window_without_a_loss_is_a_gap(tmp_path: Path) -> None:
    run = samples.write_run(tmp_path / "run", windows=2, loss=None, skipped="no units")
    page = make_page(read_sources([run]))
    assert "loss" not in [chart.name for chart in page.charts]
    rows = page.sections[0].parts[0].rows  # type: ignore[union-attr]
    assert ("skipped windows", "2") in rows
    assert ("losses that are not finite", "2") in rows


def test_long_runs_are_thinned_by_means() -> None:
    length = 10 * MOST_POINTS + 3
    xs = [float(n) for n in range(length)]
    gaps: list[float | None] = [None] * length
    gaps[-1] = 5.0
    thin, gone = thinned([xs, gaps])
    assert len(thin) <= MOST_POINTS
    assert thin[0] == pytest.approx(sum(xs[:11]) / 11)
    assert (gone[0], gone[-1]) == (None, 5.0)
    assert thinned([xs[:5]]) == [xs[:5]]


class Seen(HTMLParser):
    """What could make a browser fetch something, and the tags that are left open."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.identities: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "srcset", "poster", "data", "action"):
                self.fetched.append(value or "")
            if name == "id":
                self.identities.append(value or "")
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_refers_to_nothing_outside_itself(text: str) -> None:
    seen = Seen()
    seen.feed(text)
    assert seen.open == []
    assert len(set(seen.identities)) == len(seen.identities)
    for target in seen.fetched:
        assert target == "data:," or target.removeprefix("#") in seen.identities, target
    assert "@import" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text


def test_words_of_others_are_not_markup(text: str) -> None:
    assert "it draws &lt;again&gt;" in text
    assert "large &lt;1&gt;" in text
    embedded = re.search(r'id="charts">(.*?)</script>', text, re.S)
    assert embedded is not None
    assert "<" not in embedded[1]
    # The plotting library would take a tag for its own markup.
    assert "large &lt;1>" in json.loads(embedded[1])["benchmark-0"]["data"][0]["y"]


def test_every_colour_is_in_both_schemes(text: str) -> None:
    style = (ASSETS / "page.css").read_text(encoding="utf-8")
    light, dark = style.split("@media (prefers-color-scheme: dark)")[:2]
    used = set(re.findall(r'"(--[\w-]+)"', text + (ASSETS / "page.js").read_text(encoding="utf-8")))
    used |= {f"--series-{n}" for n in range(1, SERIES + 1)}
    used |= set(re.findall(r"var\((--[\w-]+)\)", style))
    assert len(used) > 12
    for name in used - {"--"}:
        assert f"{name}:" in light, name
        assert f"{name}:" in dark, name


def test_numbers_that_are_not_finite_are_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholebatch.cli.report.html_page._plotly", str)
    chart = Chart("a", "A", [{"type": "scatter", "y": [1.0, float("nan"), float("inf")]}])
    made = render(HtmlPage("t", "s", (Section("x", "X", (chart,)),)))
    assert '"y":[1.0,null,null]' in made


def test_two_charts_of_one_name_are_refused() -> None:
    chart = Chart("a", "A", [])
    with pytest.raises(ValueError, match="same name"):
        render(HtmlPage("t", "s", (Section("x", "X", (chart, chart)),)))


def test_the_extra_is_named(page: HtmlPage, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[report\]'"):
        render(page)


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot be written"):
        write_page(HtmlPage("t", "s", ()), tmp_path / "file" / "page.html")


def test_sources_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text('{"a": 1}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "empty").mkdir()
    for name, said in (
        ("odd.json", "is not what `wholebatch plan --json`"),
        ("broken.json", "is not JSON"),
        ("empty", "no run in this folder"),
        ("nothing", "no such run or file"),
    ):
        with pytest.raises(StateError, match=said):
            read_sources([tmp_path / name])
    run = samples.write_run(tmp_path / "run", windows=1)
    with pytest.raises(StateError, match=f"nor the folder of a run; give {run}"):
        read_sources([run / "config.json"])


def test_the_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    run = samples.write_run(tmp_path / "run", windows=4)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"window": 5, "lo')
    assert len(read_sources([run]).runs[0].records) == 4
    (run / "metrics.jsonl").write_text('{"loss": 3}\n')
    with pytest.raises(StateError, match="line 1: is not the record of a window"):
        read_sources([run])
    (run / "metrics.jsonl").write_bytes(b"\x00noise\n\xff\xfe\nmore\n")
    with pytest.raises(StateError, match="none of its 3 lines is the record of a window"):
        read_sources([run])


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    paths = [samples.write_run(tmp_path / at / "run") for at in ("a", "b")]
    assert [run.name for run in read_sources(paths).runs] == ["a/run", "b/run"]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    from wholebatch.cli import main

    monkeypatch.chdir(tmp_path)
    return lambda *arguments: main([str(argument) for argument in arguments])


def test_command(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = samples.write_run(tmp_path / "run")
    assert command("report", run) == 0
    assert "works offline" in capsys.readouterr().out
    written = (run / "report.html").read_text(encoding="utf-8")
    assert "plotly.js v" in written
    assert command("report", run, "--out", "page.txt") == 2
    assert "must be the name of an .html file" in capsys.readouterr().err
    assert command("report", tmp_path / "none") == 2
    assert "no such run or file" in capsys.readouterr().err


def test_command_opens_the_page(
    command: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    paths = [samples.write_run(tmp_path / name) for name in ("one", "two")]
    assert command("report", *paths, "--open", "--title", "Both & more") == 0
    assert opened == [(tmp_path / "report.html").resolve().as_uri()]
    assert "<h1>Both &amp; more</h1>" in (tmp_path / "report.html").read_text(encoding="utf-8")
