"""Headless Chromium, which records its console and its requests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import PATIENCE


@contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    """Selenium's driver of a browser that keeps what it writes in ``profile``."""
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("no Chromium with chromedriver (Debian: apt-get install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    names = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"]
    for name in [*names, "disable-component-update", "disable-sync", "disable-dev-shm-usage"]:
        options.add_argument(f"--{name}")
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driven = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield driven
    finally:
        driven.quit()


def opened(browser: Any, address: str, width: int) -> Any:
    """A page as a window of ``width`` pixels shows it, under 600 of them as a phone does."""
    device = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
    browser.get(address)
    return browser


def waiting(browser: Any) -> Any:
    return pytest.importorskip("selenium.webdriver.support.wait").WebDriverWait(browser, timeout=PATIENCE)


def errors(browser: Any) -> list[Any]:
    """Of the console, warnings included, since the last call."""
    return [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def requested(browser: Any, page: str) -> list[str]:
    """Addresses that this page has asked for, and all others that are not the browser's own."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [one["params"] for one in messages if one["method"] == "Network.requestWillBeSent"]
    urls = [(one["documentURL"], one["request"]["url"]) for one in sent]
    return [url for document, url in urls if document == page or not url.startswith("chrome")]
