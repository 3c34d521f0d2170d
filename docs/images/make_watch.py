"""Make the pictures of the live page from a run: python docs/images/make_watch.py RUN_FOLDER.

Best while the run goes on. Needs Chromium with its driver, and selenium (Debian: apt-get install
chromium chromium-driver fonts-inter; pip install selenium).
"""

import argparse
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from narrowcast.report.live import WatchServer

HERE = Path(__file__).parent
WINDOW = (1180, 1640)
DRAW_SECONDS = 30
"""A browser that has not drawn by then will not."""


def main() -> int:
    """Write watch-light.png and watch-dark.png beside this script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_folder", type=Path)
    folder = parser.parse_args().run_folder
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        sys.stderr.write("this needs Chromium and its driver; see the head of this script\n")
        return 3
    with serving(folder) as url, browser() as driver:
        for scheme in ("light", "dark"):
            photograph(driver, url, HERE / f"watch-{scheme}.png", scheme=scheme)
    return 0


@contextmanager
def serving(folder: Path, *, port: int = 0) -> Iterator[str]:
    """Serve the live page of the run in `folder`, on any free port unless one is named."""
    with WatchServer(folder, port=port) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.url
        finally:
            server.stopping.set()
            server.shutdown()
            thread.join()


@contextmanager
def browser() -> Iterator[Any]:
    """Start a Chromium that nobody sees, and that calls nobody."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for word in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--disable-background-networking",
        "--disable-component-update",
        "--hide-scrollbars",
        f"--window-size={WINDOW[0]},{WINDOW[1]}",
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = Service(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()


def photograph(driver: Any, url: str, target: Path, *, scheme: str) -> None:
    """Write the top of the page at `url` to `target`, once its charts are drawn."""
    wanted = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})
    driver.get(url)
    wait_until(driver, "return Boolean(document.documentElement.dataset.drawn)")
    driver.save_screenshot(str(target))


def wait_until(driver: Any, script: str, *, seconds: float = DRAW_SECONDS) -> Any:
    """Run `script` in the page until it returns something true, and return that."""
    end = time.monotonic() + seconds
    while not (found := driver.execute_script(script)):
        if time.monotonic() > end:
            raise TimeoutError(script)
        time.sleep(0.05)
    return found


if __name__ == "__main__":
    sys.exit(main())
