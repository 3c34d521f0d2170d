"""Make the pictures of the report and of a comparison: python docs/images/make.py [OPTIONS].

    --run FOLDER             a run: report-light.png and report-dark.png
    --health FOLDER          a run with statistics: health-light.png and health-dark.png
    --compare FOLDER...      runs: compare-light.png and compare-dark.png

Needs Chromium (Debian: apt-get install chromium fonts-inter; the page sets Inter where it is
installed, and the system font elsewhere). Writes the reports of the runs first.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from narrowcast.report import write_report
from narrowcast.report.compare_page import write_comparison
from narrowcast.report.comparison import compare

HERE = Path(__file__).parent
WIDTH = 1180
LARGEST_BYTES = 300_000
"""What a page of the documentation can carry twice."""
# Blink's PreferredColorScheme: 0 is dark, 1 is light.
SCHEMES = {"light": 1, "dark": 0}


def main() -> int:
    """Write the pictures that were asked for beside this script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path)
    parser.add_argument("--health", type=Path)
    parser.add_argument("--compare", nargs="+", default=[])
    options = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.stderr.write("this needs Chromium; on Debian: apt-get install chromium\n")
        return 3
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wanted: list[tuple[str, Path, int]] = []
        if options.run:
            wanted.append(("report", write_report(options.run).resolve(), 1455))
        if options.health:
            page = only_section(write_report(options.health), "health", folder / "health.html")
            wanted.append(("health", page, 1290))
        if options.compare:
            page = write_comparison(compare(options.compare), folder / "compare.html")
            wanted.append(("compare", page, 1640))
        return max([picture(browser, *each) for each in wanted], default=0)


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


def only_section(page: Path, name: str, target: Path) -> Path:
    """Write a copy of a page that shows one of its sections alone; its scripts are untouched."""
    hidden = f'body > header, main > section:not([aria-labelledby="{name}"]) {{ display: none; }}'
    top = "main > section { margin-top: 0; border: 0; padding-top: 0; }"
    text = page.read_text(encoding="utf-8")
    target.write_text(re.sub("</style>", f"{hidden} {top}</style>", text, count=1), "utf-8")
    return target


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
