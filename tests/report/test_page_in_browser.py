"""The page in a real browser: Chromium, from a file, with no network."""

import re
import shutil
import subprocess

import pytest

from narrowcast.report import write_report

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium (Debian package chromium)"),
    pytest.mark.slow,
]


def open_page(page, profile):
    """Return the page's elements once its scripts have run, and what the browser complained of."""
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--enable-logging=stderr",
            f"--user-data-dir={profile}",
            "--virtual-time-budget=60000",
            "--dump-dom",
            page.as_uri(),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=150,
    )
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, complaints


def test_every_chart_is_drawn_from_a_file_without_a_complaint(run_folder, tmp_path):
    elements, complaints = open_page(write_report(run_folder), tmp_path / "profile")
    assert complaints == []
    assert 'data-drawn="true"' in elements
    charts = re.findall(r'<div class="chart[^"]*" id="(\w+)"', elements)
    assert charts == ["loss", "scale", "norm", "lr", "lost", "speed"]
    assert len(re.findall(r'<g class="scatterlayer', elements)) >= len(charts)
    assert "@" not in "".join(re.findall(r'(?:fill|stroke): ?[^;"]*', elements))


def test_a_hostile_run_runs_nothing(make_run, plan_of, module, step, tmp_path):
    hostile = "<img src=x onerror=\"document.body.dataset.owned='yes'\"><b>bold</b>"
    records = [step(1), step(2, applied=False, why=hostile)]
    plan = plan_of([module(hostile, reason=hostile)])
    page = write_report(make_run(records, steps=2, plan=plan))
    elements, complaints = open_page(page, tmp_path / "profile")
    assert complaints == []
    assert "data-owned" not in elements.replace("dataset.owned", "")
    assert "<b>bold" not in elements
