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
PAGES = (
    "index.html", "speed.html", "verify.html", "choose.html", "troubleshooting.html",
    "integrations/transformers.html", "distributed.html", "reference.html",
    "lint/index.html", "install.html", "architecture.html", "integrations/own-loop.html",
)  # fmt: skip
# What people type -> the page that answers.
QUESTIONS = {
    "effective batch size": "gradient-accumulation.html", "OOM": "memory.html",
    "Hugging Face": "transformers.html", "LoRA": "transformers.html",
    "BatchNorm": "batchnorm.html", "torch.compile": "speed.html", "resume": "train.html",
    "no_sync": "gradient-accumulation.html", "learning rate": "scaling.html",
    "GAN": "which-mean.html",
    "gradient checkpointing": "gradient-accumulation.html",
    "num_items_in_batch": "transformers.html",
    "FSDP2": "distributed.html", "packing": "which-mean.html", "gradient noise": "scaling.html",
    "warm-up": "scaling.html", "DPO": "which-mean.html",
    "install": "install.html", "mean over tokens": "which-mean.html", "plan": "plan.html",
}  # fmt: skip
# The words of papers and tutorials: "Gradient accumulation, from A to Z" is the first answer.
FIELD = (
    "effective batch size", "linearity", "pitfall", "gradient checkpointing", "BatchNorm",
    "learning rate", "warmup", "mixed precision", "underflow", "all-reduce", "no_sync",
    "utilisation", "utilization", "generalization", "when not to use gradient accumulation",
)  # fmt: skip


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
    wide = (
        "return [...document.querySelectorAll('article pre > code')]"
        ".filter(code => code.scrollWidth > code.clientWidth + 1).length"
    )
    assert width < 1280 or name.startswith("lint") or browser.run(wide) == 0
    wanted = "slate" if width == 390 else "default"
    assert browser.run("return document.body.dataset.mdColorScheme") == wanted


def test_examples_of_docstrings_are_code(browser: Tab, site: str) -> None:
    browser.open(f"{site}/reference.html", scheme="light", width=1280)
    browser.settle()
    assert browser.run("return document.querySelectorAll('article .highlight .gp').length") >= 3
    assert browser.run("return document.querySelectorAll('article blockquote').length") == 0
    names = browser.run("return [...document.querySelectorAll('article h3')].map(h => h.id)")
    assert "wholebatch.whole_batch.WholeBatch" in names


def pages_found(browser: Tab, site: str, words: str) -> list[str]:
    """The links of the first five results, in their order."""
    from selenium.webdriver.support.ui import WebDriverWait

    browser.open(f"{site}/index.html?q={words.replace(' ', '+')}", scheme="light", width=1280)
    found = (
        "return [...document.querySelectorAll('.md-search-result__item')].slice(0, 5)"
        ".flatMap(item => [...item.querySelectorAll('a')].map(a => a.href))"
    )
    links: list[str] = WebDriverWait(browser.driver, 30).until(lambda _: browser.run(found))
    return links


@pytest.mark.parametrize("words", QUESTIONS)
def test_a_question_is_answered_by_the_first_results(browser: Tab, site: str, words: str) -> None:
    links = pages_found(browser, site, words)
    assert any(QUESTIONS[words] in link for link in links), links


@pytest.mark.parametrize("words", FIELD)
def test_the_fields_words_lead_to_the_page_about_all_of_it(
    browser: Tab, site: str, words: str
) -> None:
    assert "/gradient-accumulation.html" in pages_found(browser, site, words)[0]


def test_copying_takes_the_commands_alone(browser: Tab, site: str) -> None:
    browser.open(f"{site}/index.html", scheme="light", width=1280)
    copied = browser.run(
        "const code = [...document.querySelectorAll('article pre > code')]"
        ".find(one => one.innerText.includes('wholebatch verify bytes-gpt'));"
        "code.setAttribute('data-md-copying', ''); return code.innerText"
    )
    assert copied.strip() == "wholebatch verify bytes-gpt"
