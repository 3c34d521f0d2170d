"""Make the pictures of the report from a run: python docs/images/make.py RUN_FOLDER.

Needs Chromium (Debian: apt-get install chromium fonts-inter; the page sets Inter where it is
installed, and the system font elsewhere). Writes the run's report.html first.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from narrowcast.report import write_report

HERE = Path(__file__).parent
WINDOW = (1180, 1455)
LARGEST_BYTES = 300_000
"""What a page of the documentation can carry twice."""
# Blink's PreferredColorScheme: 0 is dark, 1 is light.
SCHEMES = {"light": 1, "dark": 0}


def main() -> int:
    """Write report-light.png and report-dark.png beside this script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_folder", type=Path)
    page = write_report(parser.parse_args().run_folder).resolve()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.stderr.write("this needs Chromium; on Debian: apt-get install chromium\n")
        return 3
    for scheme in SCHEMES:
        target = HERE / f"report-{scheme}.png"
        photograph(browser, page, target, scheme=scheme)
        if target.stat().st_size > LARGEST_BYTES:
            sys.stderr.write(f"{target} is larger than {LARGEST_BYTES:,} bytes\n")
            return 1
    return 0


def photograph(
    browser: str,
    page: Path,
    target: Path,
    *,
    scheme: str,
    window: tuple[int, int] = WINDOW,
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
