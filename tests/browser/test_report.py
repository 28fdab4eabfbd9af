"""The page in a real browser: no error, no request, every plot, both schemes, a phone."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.browser.chromium import Tab
from tests.report import samples
from wholebatch.cli.report.html_page import write_page
from wholebatch.cli.report.html_report import make_page
from wholebatch.cli.report.page_sources import read_sources

LOOKS = (Path(__file__).parent / "looks.js").read_text(encoding="utf-8")
READERS = list(itertools.product(("light", "dark"), (1280, 390)))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The page with one of everything, and how many charts it has."""
    folder = tmp_path_factory.mktemp("report")
    page = make_page(read_sources(samples.write_all(folder)))
    return write_page(page, folder / "page.html"), len(page.charts)


@pytest.fixture(scope="module", params=READERS, ids=lambda reader: f"{reader[0]}-{reader[1]}")
def seen(request: pytest.FixtureRequest, browser: Tab, report: tuple[Path, int]) -> Tab:
    scheme, width = request.param
    browser.open(report[0], scheme=scheme, width=width)
    assert browser.wait_until_drawn() == report[1]
    browser.settle()
    return browser


def test_nothing_goes_wrong_and_nothing_is_fetched(seen: Tab, report: tuple[Path, int]) -> None:
    assert seen.console() == []
    assert [url for url in seen.requests() if not url.startswith("data:")] == [
        report[0].resolve().as_uri()
    ]


def test_every_plot_is_there_and_has_marks(seen: Tab, report: tuple[Path, int]) -> None:
    marks = seen.run(
        "return [...document.querySelectorAll('.plot')].map(plot => [plot.id,"
        " plot.querySelectorAll('.scatterlayer path, .barlayer path').length,"
        " plot.getBoundingClientRect().width, plot.querySelector('svg').clientWidth])"
    )
    assert len(marks) == report[1]
    for name, count, width, drawn in marks:
        assert count > 0, f"{name} is empty"
        assert abs(width - drawn) <= 1, f"{name} does not fill its place"


def test_nothing_is_wider_than_the_screen(seen: Tab) -> None:
    wide = seen.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1]
    beyond = seen.run(
        "return [...document.querySelectorAll('h1, h2, h3, p, figure, .callout, button')]"
        ".filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.textContent)"
    )
    assert beyond == []


def test_text_can_be_read(seen: Tab) -> None:
    texts = seen.run(LOOKS)
    assert sum(text["drawn"] for text in texts) > 50
    assert len(texts) > 150
    weak = [text for text in texts if text["contrast"] < 4.5]
    assert weak == []
    assert min(text["size"] for text in texts) >= 10


def test_lines_and_bars_stand_out(seen: Tab) -> None:
    """Marks need three to one against their surface (WCAG 1.4.11)."""
    shades = seen.run(
        "const style = getComputedStyle(document.documentElement);"
        "return ['--surface', ...Array.from({length: 8}, (_, n) => `--series-${n + 1}`)]"
        ".map(name => style.getPropertyValue(name).trim())"
    )
    surface, *series = [luminance(shade) for shade in shades]
    for shade, name in zip(series, shades[1:], strict=True):
        high, low = max(shade, surface), min(shade, surface)
        assert (high + 0.05) / (low + 0.05) >= 3, name


def luminance(shade: str) -> float:
    parts = [int(shade[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_plots_follow_the_scheme_while_the_page_is_open(
    browser: Tab, report: tuple[Path, int]
) -> None:
    line = (
        "return getComputedStyle(document.querySelector('#loss .scatterlayer .js-line')).stroke"
        " + getComputedStyle(document.querySelector('#loss .xtick text')).fill"
    )
    browser.open(report[0], scheme="light", width=1280)
    browser.wait_until_drawn()
    light = browser.run(line)
    browser.prefer("dark")
    browser.settle()
    dark = browser.run(line)
    assert light != dark
    browser.prefer("light")
    browser.settle()
    assert browser.run(line) == light


def test_the_reader_chooses_what_is_along_x(browser: Tab, report: tuple[Path, int]) -> None:
    browser.open(report[0], scheme="light", width=390)
    browser.wait_until_drawn()
    axis = "return document.querySelector('#loss .xtitle').textContent"
    assert browser.run(axis) == "window"
    browser.run("document.querySelectorAll('#training .axes button')[2].click()")
    browser.settle()
    assert browser.run(axis) == "minutes of training"
    pressed = "return document.querySelectorAll('.axes [aria-pressed=true]').length"
    assert browser.run(pressed) == 1
    assert browser.run("return document.getElementById('loss').data[0].x.at(-1)") == pytest.approx(
        30 * 0.5 / 60
    )
    assert browser.console() == []


def test_the_policy_stops_what_the_page_does_not_ask_for(
    browser: Tab, report: tuple[Path, int]
) -> None:
    """The head forbids every request, also those that a library might make one day."""
    browser.open(report[0], scheme="light", width=1280)
    browser.wait_until_drawn()
    stopped = browser.run(
        "return fetch('http://127.0.0.1:9/').then(() => 'sent', error => String(error))"
    )
    assert "TypeError" in stopped
    assert any("Content Security Policy" in said for said in browser.console())
