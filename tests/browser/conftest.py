"""A headless browser without a network, for the tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Page:
    """A page in the browser.

    Args:
        driver: selenium's.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path) -> None:
        """Load a file and wait until it is drawn. Nothing may be loaded or said on the console meanwhile."""
        self.driver.get(path.as_uri())
        self.wait("return document.readyState === 'complete' && 'ready' in document.documentElement.dataset")
        self.check_console()

    def wait(self, script: str) -> None:
        """Wait until a script returns true, for 30 s at most."""
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.driver, 30).until(lambda _: self.run(script))

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self.driver.execute_script(script, *arguments)

    def check_console(self) -> None:
        """The console has no message, and the page has loaded no other file."""
        assert self.driver.get_log("browser") == []
        loaded = self.run("return performance.getEntriesByType('resource').map(({ name }) => name)")
        assert [name for name in loaded if not name.startswith(("data:", "blob:"))] == []

    def seek(self, time: float) -> None:
        """Go to a time."""
        self.run("explorer.seek(arguments[0])", time)

    def states(self, view: int = 0) -> dict[tuple[str, int], str]:
        """What the page shows now: the state of each tile on each rank."""
        rows = self.run(
            "return [...document.querySelectorAll('.view')[arguments[0]].querySelectorAll('.pip')]"
            ".map(({ dataset }) => [dataset.tile, +dataset.rank, dataset.state])",
            view,
        )
        return {(tile, rank): state for tile, rank, state in rows}

    def links(self) -> set[tuple[int, int]]:
        """The links that carry something now."""
        found = self.run("return [...document.querySelectorAll('.link')].map(({ dataset }) => dataset.link)")
        return {(int(src), int(dst)) for src, dst in (link.split("-") for link in found)}

    def running(self) -> dict[int, set[int]]:
        """The ids of the ops that each rank executes now, as the list of the ranks says."""
        found = self.run("return [...document.querySelectorAll('.now li')].map(({ dataset }) => dataset.ops)")
        return {rank: set(map(int, ids.split())) for rank, ids in enumerate(found)}

    def text(self, selector: str) -> str:
        """The text of an element."""
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def texts(self, selector: str) -> list[str]:
        """The texts of all such elements."""
        script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)"
        found = self.run(script, selector)
        return list(map(str, found))

    def click(self, selector: str) -> None:
        """Click an element as a reader would."""
        self.run(
            "const node = document.querySelector(arguments[0]); node.scrollIntoView({block: 'center'});"
            "node.dispatchEvent(new MouseEvent('click', { bubbles: true }))",
            selector,
        )

    def press(self, *keys: str) -> None:
        """Press keys, one after the other."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver, duration=0).send_keys(*keys).perform()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A new browser with an empty profile. .ci/run installs what it needs, and fails without it."""
    pytest.importorskip("mpld3", reason="pages need mpld3, which has D3")
    pytest.importorskip("selenium", reason="the browser is driven by selenium")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium or no chromedriver; on Debian: apt-get install chromium chromium-driver")
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}", "--window-size=1300,1200"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = Chrome(options=options, service=Service(driver))
    try:
        yield Page(opened)
    finally:
        opened.quit()
