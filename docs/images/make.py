"""Make the pictures of a comparison: python docs/images/make.py RUN_FOLDER...

Writes compare-light.png and compare-dark.png. Needs Chromium (Debian: apt-get install chromium
fonts-inter; the page sets Inter where it is installed, and the system font elsewhere).

The pictures of the report and the live page are made by a test, of a run that it trains:
pytest tests/report/test_pictures.py --pictures docs/images
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from narrowcast.report.compare.comparison import compare
from narrowcast.report.compare.page import write_comparison

HERE = Path(__file__).parent
WIDTH = 1180
LARGEST_BYTES = 300_000
"""What a page of the documentation can carry twice."""
# Blink's PreferredColorScheme: 0 is dark, 1 is light.
SCHEMES = {"light": 1, "dark": 0}


def main() -> int:
    """Write the pictures beside this script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_folders", nargs="+", metavar="RUN_FOLDER")
    options = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.stderr.write("this needs Chromium; on Debian: apt-get install chromium\n")
        return 3
    with tempfile.TemporaryDirectory() as name:
        page = write_comparison(compare(options.run_folders), Path(name) / "compare.html")
        return picture(browser, "compare", page, 1640)


def picture(browser: str, name: str, page: Path, height: int) -> int:
    """Take the light and the dark picture of a page; return 1 where one is too large."""
    code = 0
    for scheme in SCHEMES:
        target = HERE / f"{name}-{scheme}.png"
        photograph(browser, page, target, scheme=scheme, window=(WIDTH, height))
        if target.stat().st_size > LARGEST_BYTES:
            sys.stderr.write(f"{target} is larger than {LARGEST_BYTES:,} bytes\n")
            code = 1
    return code


def photograph(
    browser: str,
    page: Path,
    target: Path,
    *,
    scheme: str,
    window: tuple[int, int],
) -> None:
    """Take a picture of the top of `page`, in a browser that has never been used."""
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
                f"--window-size={window[0]},{window[1]}",
                # Time for the charts; it passes at once where nothing is left to do.
                "--virtual-time-budget=10000",
                f"--screenshot={target}",
                page.as_uri(),
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )


if __name__ == "__main__":
    sys.exit(main())
