"""A browser to try pages in, and what it says of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


class Browser:
    """A page in Chromium, with what it fetched and complained about."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(
        self, path: Path, *, width: int = 1280, scheme: str = "light", script: bool = True
    ) -> None:
        from selenium.webdriver.support.wait import WebDriverWait

        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.command("Emulation.setEmulatedMedia", features=[feature])
        self.command("Emulation.setScriptExecutionDisabled", value=not script)
        self.driver.get_log("performance")
        self.driver.get_log("browser")
        self.driver.get(path.as_uri())
        # A busy driver does not wait for all of a long page if scripts are off.
        WebDriverWait(self.driver, 300).until(
            lambda _: self.ask("return document.readyState") == "complete"
        )

    def command(self, name: str, **parameters: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, parameters)

    def ask(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def press(self, key: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(key).perform()

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def requests(self) -> list[str]:
        """The addresses that were asked for since the page was opened."""
        messages = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    # Without a sandbox, since root has none; what it opens are pages of this test.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.chrome.service.Service(driver)
    session = webdriver.Chrome(options=options, service=service)
    # On a busy machine, a script over all of a page takes longer than the usual half a minute.
    session.set_script_timeout(300)
    yield Browser(session)
    session.quit()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """A browser in which nothing may go wrong unnoticed and nothing may be fetched."""
    yield chromium
    assert [url for url in chromium.requests() if not url.startswith(("file://", "data:"))] == []
    assert chromium.complaints() == []


@pytest.fixture
def page(tmp_path: Path) -> Callable[[str], Path]:
    """Write a piece of HTML into a page as a notebook would."""

    def write(body: str) -> Path:
        path = tmp_path / "notebook.html"
        path.write_text(f"<!DOCTYPE html><meta charset=utf-8><title>t</title><body>{body}")
        return path

    return write
