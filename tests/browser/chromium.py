"""Debian's Chromium without a window, and what it saw: errors, requests, colours, pictures."""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


def programs() -> tuple[str, str] | None:
    """Where Chromium and its driver are; None if one of them is missing."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


@dataclass
class Tab:
    """One page in one browser of its own."""

    driver: Any

    def open(self, page: Path | str, *, scheme: str, width: int, height: int = 900) -> None:
        """Load a file or an address as a reader with this scheme and width; phones have fingers."""
        phone = width < 600
        self._tell(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        self._tell("Emulation.setTouchEmulationEnabled", enabled=phone)
        self.prefer(scheme)
        self.driver.get_log("performance")  # what came before is not this page's
        self.driver.get(page if isinstance(page, str) else page.resolve().as_uri())

    def prefer(self, scheme: str) -> None:
        """The reader's system changes to `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._tell("Emulation.setEmulatedMedia", features=features)

    def run(self, script: str, *arguments: object) -> Any:
        """The value that a piece of JavaScript returns; a promise is awaited."""
        return self.driver.execute_script(script, *arguments)

    def wait_until_drawn(self) -> int:
        """How many charts the page says it drew."""
        from selenium.webdriver.support.ui import WebDriverWait

        drawn = "return document.documentElement.dataset.drawn"
        return int(WebDriverWait(self.driver, 60).until(lambda _: self.run(drawn)))

    def settle(self) -> None:
        """Let what was asked of the page be painted."""
        self.run("return new Promise(done => requestAnimationFrame(() => setTimeout(done, 100)))")

    def console(self) -> list[str]:
        """What the page complained about."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Every address that was asked for since the page was opened."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
                parameters = message["params"]
                found.append(str(parameters.get("request", parameters)["url"]))
        return found

    def picture(self, path: Path, selector: str | None = None) -> Path:
        """The page, or one element of it, as a PNG in whole length."""
        box = self.run(
            "const e = arguments[0] ? document.querySelector(arguments[0]) : document.body;"
            "const r = e.getBoundingClientRect(), m = arguments[0] ? 12 : 0;"
            "return {x: Math.max(0, r.x + scrollX - m), y: Math.max(0, r.y + scrollY - m),"
            " width: Math.min(r.width + 2 * m, document.documentElement.clientWidth),"
            " height: r.height + 2 * m}",
            selector,
        )
        taken = self._tell(
            "Page.captureScreenshot",
            format="png",
            captureBeyondViewport=True,
            clip={**box, "scale": 1},
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(taken["data"]))
        return path

    def _tell(self, command: str, **parameters: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, parameters)


@contextmanager
def tab() -> Iterator[Tab]:
    """A browser with an empty profile, ended and forgotten afterwards."""
    from selenium import webdriver

    found = programs()
    assert found is not None, "chromium and chromedriver are needed: make browser-test"
    profile = tempfile.mkdtemp(prefix="chromium-")
    options = webdriver.ChromeOptions()
    options.binary_location = found[0]
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(found[1]))
    try:
        driver.get("about:blank")  # away from the browser's own first page, which loads things
        yield Tab(driver)
    finally:
        driver.quit()
        shutil.rmtree(profile, ignore_errors=True)
