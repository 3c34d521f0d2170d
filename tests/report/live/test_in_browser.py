"""The live page in a real browser, while another process writes the run."""

import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest

from narrowcast.runs import EvalRecord, FindingRecord, PrecisionRecord, RunFolder, to_line

pytestmark = pytest.mark.usefixtures("browser_is_there")

WRITER = """
import sys, time
from narrowcast.runs import RunFolder, EvalRecord, CheckpointRecord, from_line
steps = [from_line(line) for line in open(sys.argv[2])]
with RunFolder.open(sys.argv[1]) as run:
    for record in steps:
        run.write(record)
        print(record.step, flush=True)
        sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def driver(make_watch):
    with make_watch.browser() as started:
        yield started


@pytest.fixture
def opened(make_watch, driver):
    """Open the live page of a folder, and return a function that waits for something in it."""
    with ExitStack() as stack:

        def open_at(folder):
            driver.get(stack.enter_context(make_watch.serving(folder)))
            driver.get_log("browser")
            return lambda script: make_watch.wait_until(driver, f"return {script}", seconds=30)

        yield open_at
        driver.get("about:blank")


@pytest.fixture
def writer(tmp_path):
    """A process that writes the records of a file to a run, one each time it is told to."""
    started = []

    def start(folder, records):
        (tmp_path / "to-write").write_text("".join(to_line(r) + "\n" for r in records))
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(tmp_path / "to-write")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def text_of(name):
    return f"document.getElementById('{name}').textContent"


DRAWN = "Number(document.documentElement.dataset.drawn ?? 0)"
LAST_X = "document.getElementById('loss').data[0].x.at(-1)"


def test_a_run_is_followed_while_another_process_writes_it(make_run, step, opened, writer, driver):
    folder = make_run([], steps=5)
    see = opened(folder)
    assert see(f"{text_of('state')} === 'Starting'")
    process = writer(folder, [step(n, loss=3.0 - n / 10) for n in range(1, 6)])
    for n in (2, 3, 4):
        assert see(f"{text_of('progress')} === 'Step {n - 1} of 5'")
        assert see(f"{text_of('state')} === 'Running'")
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"{n}\n"
    assert see(f"{DRAWN} > 0 && {LAST_X} === 4")
    process.kill()
    process.wait()
    assert see(f"{text_of('state')} === 'Seems dead'")
    assert "narrowcast resume" in see(text_of("advice"))
    assert driver.get_log("browser") == []


def test_a_resumed_run_is_drawn_anew(make_run, step, opened):
    folder = make_run([step(n) for n in range(1, 31)], steps=50)
    see = opened(folder)
    assert see(f"{DRAWN} && {LAST_X} === 30")
    with RunFolder.open(folder) as run:
        run.rewind(10)
    assert see(f"{text_of('progress')} === 'Step 10 of 50' && {LAST_X} === 10")
    with RunFolder.open(folder) as run:
        for n in range(11, 36):
            run.write(step(n, seconds=0.2))
    assert see(f"{LAST_X} === 35")


def test_ten_thousand_steps_open_in_two_seconds_with_every_chart(
    make_run, course, opened, driver, make_watch
):
    folder = make_run(course(10_000, eval_every=500), steps=10_000)
    see = opened(folder)
    assert see(DRAWN)
    took = []
    for _ in range(3):  # other tests may be at work on the same cores
        began = time.monotonic()
        driver.refresh()
        assert see(f"document.getElementById('facts').children.length >= 6 && {DRAWN}")
        took.append(time.monotonic() - began)
    assert min(took) < 2
    shown = driver.execute_script(
        "return [...document.querySelectorAll('figure:not([hidden]) .chart')].map((c) => c.id)"
    )
    assert shown == ["loss", "scale", "speed", "memory", "norm", "lr", "lost"]
    assert driver.get_log("browser") == []


def test_a_hostile_run_runs_nothing(make_run, step, opened, driver):
    bad = "<img src=x onerror=\"document.body.dataset.owned='yes'\"><b>bold</b>`<i>code`"
    records = [
        step(1),
        step(2, applied=False, skip_reason=bad),
        FindingRecord(
            step=2, module=bad, role=bad, what=bad, why=bad, action=bad, since=2, advice=bad
        ),
        PrecisionRecord(step=2, module=bad, before=bad, after=bad, reason=bad),
        EvalRecord(step=2, metrics={bad: 1.0, "__proto__": 2.0}),
        step(3),
    ]
    folder = make_run(records, steps=9, name=bad, description=bad, **{"precision.policy": bad})
    see = opened(folder)
    assert see(DRAWN)
    driver.execute_script("Plotly.Fx.hover('loss', [{curveNumber: 0, pointNumber: 1}])")
    assert driver.execute_script("return document.querySelectorAll('b, i, img').length") == 0
    assert "yes" not in str(driver.execute_script("return document.body.dataset.owned"))
    assert see(text_of("title")).startswith("<img")
    assert driver.get_log("browser") == []


def test_a_page_says_that_the_server_has_ended_and_goes_on_when_it_is_back(
    make_run, step, make_watch, driver
):
    folder = make_run([step(1)], steps=9)
    with make_watch.serving(folder) as url:
        driver.get(url)
        make_watch.wait_until(driver, f"return {DRAWN}")
    make_watch.wait_until(driver, "return !document.getElementById('out-of-reach').hidden")
    assert driver.execute_script(f"return {text_of('progress')}") == "Step 1 of 9"
    port = int(url.rpartition(":")[2].strip("/"))
    with make_watch.serving(folder, port=port):
        make_watch.wait_until(driver, "return document.getElementById('out-of-reach').hidden")
    driver.get("about:blank")


def streams():
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_a_page_nobody_sees_gives_its_connection_back(make_run, step, opened, driver):
    see = opened(make_run([step(1)], steps=9))
    assert see(DRAWN)
    driver.execute_script(
        "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    end = time.monotonic() + 10
    while streams():
        assert time.monotonic() < end
        time.sleep(0.05)
    driver.execute_script(
        "Object.defineProperty(document, 'hidden', {value: false, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    while not streams():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_pictures_are_light_and_dark(make_run, course, make_watch, driver, tmp_path):
    folder = make_run(course(300, eval_every=50), steps=400)
    sizes = {}
    with make_watch.serving(folder) as url:
        for scheme in ("light", "dark"):
            target = tmp_path / f"{scheme}.png"
            make_watch.photograph(driver, url, target, scheme=scheme)
            sizes[scheme] = target.stat().st_size
            ground = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
            channels = [int(n) for n in ground[4:-1].split(",")]
            assert (min(channels) > 200) == (scheme == "light")
            assert (max(channels) < 60) == (scheme == "dark")
        driver.get("about:blank")
    assert all(20_000 < size < 300_000 for size in sizes.values())
