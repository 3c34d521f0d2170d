"""The pictures of the documentation, of a run that is trained here, and whether they can be read.

    pytest tests/report/test_pictures.py --pictures docs/images

writes report-, health- and watch-light.png and -dark.png; without the option nothing is kept.
"""

import base64
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from narrowcast.report.compare.comparison import compare
from narrowcast.report.compare.page import write_comparison

pytestmark = pytest.mark.usefixtures("browser_is_there")

LARGEST_BYTES = 400_000
"""What a page of the documentation can carry twice."""
WIDTH, PHONE = 1180, 390
LEAST_CONTRAST = 4.5
"""Of text on its ground, by WCAG 2.2 for AA."""

STEPS = 120
# health/saturating in small: at first fp16 loses gradients, because the scale begins at 1; then the
# values of one layer outgrow it, steps are skipped, and the layer goes on in bf16.
WORDS = [
    f"steps={STEPS}",
    "batch_size=8",
    "data.length=64",
    "data.eval_windows=16",
    "model.width=64",
    "rehearse.swell=4",
    "precision.loss_scale.init_scale=1",
    "precision.loss_scale.growth_interval=10",
    "health.every=4",
    "eval.every=30",
]

READ = (Path(__file__).parent / "readable.js").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Sight:
    """A run that was trained while its live page was looked at, and a browser."""

    folder: Path
    pictures: Path
    driver: Any
    script: Any

    def open(self, url: str, *, scheme: str, width: int = WIDTH) -> dict[str, Any]:
        """Open a page, wait until it is drawn, and return what can be read of it."""
        wanted = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", wanted)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        self.driver.get(url)
        self.see("Boolean(document.documentElement.dataset.drawn)")
        return self.driver.execute_script(READ, LEAST_CONTRAST)

    def see(self, script: str) -> Any:
        return self.script.wait_until(self.driver, f"return {script}", seconds=60)

    def photograph(self, name: str, *, top: float, bottom: float) -> None:
        """Keep a picture of the page from `top` to `bottom`."""
        clip = {"x": 0, "y": top, "width": WIDTH, "height": bottom - top, "scale": 1}
        options = {"format": "png", "captureBeyondViewport": True, "clip": clip}
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", options)
        (self.pictures / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))


@pytest.fixture(scope="module")
def sight(request, tmp_path_factory, make_watch):
    """Train a run, with pictures of its live page shortly before it ends."""
    here = tmp_path_factory.mktemp("pictures")
    folder = here / "run"
    words = [sys.executable, "-m", "narrowcast", "train", "health/saturating", "-q", *WORDS]
    with make_watch.browser() as driver:
        made = Sight(folder, request.config.getoption("--pictures") or here, driver, make_watch)
        driver.get("about:blank")
        # Tests ask for Triton's interpreter; a user does not, and it makes readings slow.
        known = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        process = subprocess.Popen([*words, "--out", str(folder)], cwd=here, env=known)
        try:
            while process.poll() is None and steps_in(folder) < 0.75 * STEPS:
                time.sleep(0.2)
            # Held still, so that every picture is of the same step of a run that goes on.
            process.send_signal(signal.SIGSTOP)
            watch(made)
            process.send_signal(signal.SIGCONT)
            assert process.wait(timeout=150) == 0
        finally:
            process.kill()
            process.wait()
        yield made


def steps_in(folder: Path) -> int:
    records = folder / "records.jsonl"
    return records.read_text().count('"kind": "step"') if records.exists() else 0


def watch(made: Sight) -> None:
    with made.script.serving(made.folder) as url:
        for scheme in ("light", "dark"):
            assert_readable(made.open(url, scheme=scheme), scheme=scheme, width=WIDTH)
            assert made.see("document.getElementById('state').textContent") == "Running"
            made.photograph(f"watch-{scheme}", top=0, bottom=1640)
        made.driver.get("about:blank")


def assert_readable(found: dict[str, Any], *, scheme: str, width: int) -> None:
    assert found["charts"]
    assert found["faint"] == []
    assert found["collisions"] == []
    assert found["cut"] == []
    assert (found["width"], found["wide"]) == (width, width)
    assert (min(found["ground"]) > 200) == (scheme == "light")
    assert (max(found["ground"]) < 60) == (scheme == "dark")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_of_a_real_run_can_be_read_and_names_the_layer(sight, scheme):
    found = sight.open((sight.folder / "report.html").as_uri(), scheme=scheme)
    assert_readable(found, scheme=scheme, width=WIDTH)
    assert sight.driver.get_log("browser") == []
    told = sight.see("document.querySelector('.notices').textContent")
    assert "Overflow in blocks.2.mlp.down (input) at step" in told
    assert "blocks.2.mlp.down went from fp16 to bf16 at step" in told
    worst = sight.see("document.querySelector('.sortable tbody tr').textContent")
    assert worst.startswith("blocks.2.mlp.downinput")
    sight.photograph(f"report-{scheme}", top=0, bottom=1455)
    top, bottom = sight.driver.execute_script(
        "const health = document.querySelector('section[aria-labelledby=health]');"
        "return [health.getBoundingClientRect().top, "
        "health.querySelector('.pair figure').getBoundingClientRect().bottom]"
    )
    sight.photograph(f"health-{scheme}", top=top + 1, bottom=bottom + 16)
    for name in ("watch", "report", "health"):
        size = (sight.pictures / f"{name}-{scheme}.png").stat().st_size
        assert 20_000 < size < LARGEST_BYTES


def test_the_report_can_be_read_on_a_phone(sight):
    url = (sight.folder / "report.html").as_uri()
    found = sight.open(url, scheme="dark", width=PHONE)
    assert_readable(found, scheme="dark", width=PHONE)


def test_the_live_page_can_be_read_on_a_phone(sight):
    with sight.script.serving(sight.folder) as url:
        found = sight.open(url, scheme="light", width=PHONE)
        sight.driver.get("about:blank")
    assert_readable(found, scheme="light", width=PHONE)


def test_a_comparison_with_long_names_fits_a_phone(sight, make_run, course):
    schedule = [{"policy": "fp32", "until": "15%"}, {"policy": "fp8-delayed", "until": "90%"}]
    runs = [
        make_run(course(60, eval_every=20), folder="first", steps=60),
        make_run(
            course(60, eval_every=20, seed=1),
            folder="second",
            steps=60,
            **{"precision.schedule": [*schedule, {"policy": "bf16"}], "optimizer.lr": 2e-3},
        ),
    ]
    page = write_comparison(compare([str(run) for run in runs]), runs[0] / "compare.html")
    found = sight.open(page.as_uri(), scheme="light", width=PHONE)
    assert_readable(found, scheme="light", width=PHONE)
