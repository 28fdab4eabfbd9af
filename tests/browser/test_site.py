"""The documentation's site in a real browser: it comes from one place, and can be read."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.browser.chromium import Tab

ROOT = Path(__file__).parents[2]
PAGES = ("index.html", "verify.html", "reference/training.html", "lint/index.html")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the site, built from the pages as they are."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", PAGES)
def test_page(browser: Tab, site: str, name: str, width: int) -> None:
    browser.open(f"{site}/{name}", scheme="dark" if width == 390 else "light", width=width)
    browser.settle()
    assert browser.console() == []
    others = [u for u in browser.requests() if not u.startswith((site, "data:", "blob:"))]
    assert others == []
    assert browser.run("return document.querySelectorAll('article h1').length") == 1
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    wanted = "slate" if width == 390 else "default"
    assert browser.run("return document.body.dataset.mdColorScheme") == wanted


def test_examples_of_docstrings_are_code(browser: Tab, site: str) -> None:
    browser.open(f"{site}/reference/training.html", scheme="light", width=1280)
    assert browser.run("return document.querySelectorAll('article .highlight .gp').length") >= 3
    assert browser.run("return document.querySelectorAll('article blockquote').length") == 0
    names = browser.run("return [...document.querySelectorAll('article h2')].map(h => h.id)")
    assert "wholebatch.core.whole_batch.WholeBatch" in names


def test_search_finds(browser: Tab, site: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    browser.open(f"{site}/index.html?q=accumulator", scheme="light", width=1280)
    found = "return document.querySelectorAll('.md-search-result__item').length"
    assert WebDriverWait(browser.driver, 30).until(lambda _: browser.run(found)) > 0
