"""The page of `wholebatch report` in a real browser: both colour schemes, a desktop and a phone."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.browser.chromium import Tab
from tests.cli.helpers import EXACT
from wholebatch.cli import main

LOOKS = (Path(__file__).parent / "looks.js").read_text(encoding="utf-8")
READERS = list(itertools.product(("light", "dark"), (1200, 420)))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two runs with held-out samples."""
    folder = tmp_path_factory.mktemp("report")
    recipe = folder / "mine.py"
    recipe.write_text(EXACT + "\ndef validation():\n    return data()\n", encoding="utf-8")
    runs = [str(folder / name) for name in ("first", "second")]
    for run, micro in zip(runs, ("4", "5"), strict=True):
        options = ["--micro-batch", micro, "--validate", "2", "--updates", "6"]
        assert main(["train", str(recipe), "--out", run, *options]) == 0
    page = folder / "page.html"
    assert main(["report", *runs, "--out", str(page)]) == 0
    return page


@pytest.fixture(scope="module", params=READERS, ids=lambda reader: f"{reader[0]}-{reader[1]}")
def seen(request: pytest.FixtureRequest, browser: Tab, report: Path) -> Tab:
    scheme, width = request.param
    browser.open(report, scheme=scheme, width=width)
    assert browser.wait_until_drawn() == 4
    browser.settle()
    return browser


def test_nothing_goes_wrong_and_nothing_is_fetched(seen: Tab, report: Path) -> None:
    assert seen.console() == []
    assert [url for url in seen.requests() if not url.startswith("data:")] == [
        report.resolve().as_uri()
    ]


def test_every_plot_has_lines_within_its_card(seen: Tab) -> None:
    marks = seen.run(
        "return [...document.querySelectorAll('.plot')].map(card => {"
        " const of = one => one.getBoundingClientRect(), box = of(card);"
        " const drawn = [...card.querySelectorAll('svg *, li')].map(of).filter(one => one.width);"
        " return [card.querySelector('h3').textContent, card.querySelectorAll('svg path').length,"
        " Math.min(...drawn.flatMap(one => [one.left - box.left, one.top - box.top,"
        " box.right - one.right, box.bottom - one.bottom]))]})"
    )
    assert len(marks) == 4
    for name, count, room in marks:
        assert count > 1, f"{name} is empty"
        assert room >= 0, f"{name} is drawn {-room} pixels outside of its card"


def test_nothing_is_wider_than_the_screen(seen: Tab) -> None:
    wide = seen.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1]


def test_text_can_be_read(seen: Tab) -> None:
    texts = seen.run(LOOKS)
    assert len(texts) > 100
    assert [text for text in texts if text["contrast"] < 4.5] == []
    assert min(text["size"] for text in texts) >= 10


def test_plots_follow_the_scheme_while_the_page_is_open(browser: Tab, report: Path) -> None:
    text = "return getComputedStyle(document.querySelector('#plot-0 text')).fill"
    browser.open(report, scheme="light", width=1280)
    browser.wait_until_drawn()
    light = browser.run(text)
    browser.prefer("dark")
    browser.settle()
    assert browser.run(text) != light
