"""The page in a real browser: Chromium, from a file, with no network."""

import json
import re
import shutil
import subprocess
from importlib.resources import files

import pytest

from narrowcast.report import write_report
from narrowcast.report.charts.heat import heat_map
from narrowcast.report.compare.comparison import compare
from narrowcast.report.compare.page import write_comparison

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium (Debian package chromium)")


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


def open_and_act(page, script, profile):
    """Open a page that a reader then acts on, and return what the acts wrote down.

    The page's own policy forbids any other script, so the copy goes without it.
    """
    text = re.sub(r"<meta http-equiv=[^>]*>", "", page.read_text(encoding="utf-8"))
    acting = f"""<script>
      const noted = {{}};
      const until = (ready) => new Promise((resolve) => {{
        const look = () => (ready() ? resolve() : setTimeout(look, 20));
        look();
      }});
      (async () => {{
        await until(() => document.documentElement.dataset.drawn);
        {script}
        const place = document.createElement("pre");
        place.id = "noted";
        place.textContent = JSON.stringify(noted);
        document.body.append(place);
      }})();
    </script>"""
    copy = page.with_name("acted.html")
    copy.write_text(text.replace("</body>", f"{acting}</body>"), encoding="utf-8")
    elements, complaints = open_page(copy, profile)
    assert complaints == []
    found = re.search(r'<pre id="noted">(.*?)</pre>', elements, re.DOTALL)
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


def test_every_chart_is_drawn_from_a_file_without_a_complaint(run_folder, tmp_path):
    elements, complaints = open_page(write_report(run_folder), tmp_path / "profile")
    assert complaints == []
    assert 'data-drawn="true"' in elements
    charts = re.findall(r'<div class="chart[^"]*" id="(\w+)"', elements)
    assert charts == ["loss", "scale", "norm", "lr", "lost", "speed"]
    assert len(re.findall(r'<g class="scatterlayer', elements)) >= len(charts)
    assert "@" not in "".join(re.findall(r'(?:fill|stroke): ?[^;"]*', elements))


def test_the_heat_map_and_the_histograms_are_drawn(healthy_folder, tmp_path):
    elements, complaints = open_page(write_report(healthy_folder), tmp_path / "profile")
    assert complaints == []
    assert 'data-drawn="true"' in elements
    assert len(re.findall(r'<g class="heatmaplayer[^>]*><g class="hm"', elements)) == 1
    assert len(re.findall(r'<g class="barlayer[^>]*><g class="trace bars"', elements)) == 2
    assert "@" not in "".join(re.findall(r'(?:fill|stroke): ?[^;"]*', elements))


def test_a_reader_can_choose_quantity_tensors_and_order_and_read_cells_by_keyboard(
    healthy_folder, tmp_path
):
    script = """
      const texts = () => [...document.querySelectorAll("#heat .ytick text")];
      const labels = () => texts().map((text) => text.textContent);
      const choose = (id, value) => {
        const field = document.getElementById(id);
        field.value = value;
        field.dispatchEvent(new Event("change", { bubbles: true }));
      };
      const frame = document.getElementById("heat-frame");
      const press = (key) => frame.dispatchEvent(new KeyboardEvent("keydown", { key }));
      const pause = () => new Promise((resolve) => setTimeout(resolve, 200));
      noted.modules = labels();
      choose("heat-order", "worst"); await pause();
      noted.worst = labels();
      choose("heat-role", "each"); await pause();
      noted.each = labels();
      press("ArrowDown"); await pause();
      noted.snr = document.getElementById("heat-cell").textContent;
      document.querySelector("input[value=overflow]").click(); await pause();
      noted.cleared = document.getElementById("heat-cell").textContent;
      press("ArrowDown"); press("ArrowLeft"); await pause();
      noted.overflow = document.getElementById("heat-cell").textContent;
      noted.outlined = document.querySelectorAll("#heat .shapelayer path").length;
    """
    noted = open_and_act(write_report(healthy_folder), script, tmp_path / "profile")
    names = ["blocks.0.attn.qkv", "blocks.0.mlp.down", "blocks.1.attn.qkv", "blocks.1.mlp.down"]
    assert noted["modules"] == names
    assert noted["worst"][0] == "blocks.1.mlp.down"
    assert noted["each"][0] == "blocks.1.mlp.down · input"
    assert len(noted["each"]) == 8
    assert re.fullmatch(r"blocks\.1\.mlp\.down · input in e4m3, step 300: \d+\.\d dB", noted["snr"])
    assert noted["cleared"] == ""
    assert re.fullmatch(
        r"blocks\.1\.mlp\.down · input in e4m3, step 290: [\d.]+ %", noted["overflow"]
    )
    assert noted["outlined"] >= 1


def test_the_rows_that_are_drawn_are_those_of_the_records(growing, tmp_path):
    names = [f"blocks.{i}.{part}" for i in range(20) for part in ("attn", "mlp")]
    heat = heat_map(growing(range(10, 101, 10), names))
    planned = [
        {"measure": measure, "role": role, "order": order, "all": everything}
        for measure in ("snr_db", "overflow")
        for role in ("worst", "each", "role:input")
        for order in ("model", "worst")
        for everything in (True, False)
    ]
    code = files("narrowcast.report").joinpath("templates", "heat.js").read_text()
    page = tmp_path / "heat.html"
    page.write_text(
        f"<body><script>{code} const data = {json.dumps(heat.data)};"
        f"const choices = {json.dumps(planned)};"
        """
        const found = choices.map((choice) => {
          const { rows, of } = heatMap.figure(data, choice, { range: [0, 1], quiet: "red" });
          const shown = ({ module, role, values }) => ({ module, role, values });
          return { of, rows: rows.map(shown) };
        });
        document.body.textContent = JSON.stringify(found);
        </script></body>""",
        encoding="utf-8",
    )
    elements, complaints = open_page(page, tmp_path / "profile")
    assert complaints == []
    drawn = json.loads(re.search(r"<body>(.*)</body>", elements, re.DOTALL)[1])
    for choice, found in zip(planned, drawn, strict=True):
        expected = rows_by_hand(heat.data, choice)
        assert found["of"] == len(expected)
        if choice["order"] == "model" and choice["all"]:
            assert found["rows"] == expected
        else:
            assert len(found["rows"]) == (
                len(expected) if choice["all"] else min(24, len(expected))
            )
            assert all(row in expected for row in found["rows"])
        pick = min if choice["measure"] == "snr_db" else max
        worst = pick(expected, key=lambda row: pick(row["values"]))
        assert worst in found["rows"]
        if choice["order"] == "worst":
            assert pick(found["rows"][0]["values"]) == pick(worst["values"])


def rows_by_hand(data, choice):
    pick = min if choice["measure"] == "snr_db" else max
    columns = len(data["spans"])
    rows = {}
    for (module, role, _), found in zip(
        data["rows"], data["measures"][choice["measure"]], strict=True
    ):
        if choice["role"].startswith("role:") and role != choice["role"][5:]:
            continue
        values = found if isinstance(found, list) else [found] * columns
        key = (module, role if choice["role"] == "each" else "")
        before = rows.get(key, values)
        rows[key] = [pick(pair) for pair in zip(before, values, strict=True)]
    return [{"module": m, "role": r, "values": values} for (m, r), values in rows.items()]


def test_a_comparison_is_drawn(make_run, course, tmp_path):
    folders = [
        str(make_run(course(60, eval_every=20, seed=s), steps=60, folder=f"r{s}", seed=s))
        for s in (0, 1, 2)
    ]
    page = write_comparison(compare(folders), tmp_path / "page.html")
    elements, complaints = open_page(page, tmp_path / "profile")
    assert complaints == []
    assert 'data-drawn="true"' in elements
    assert "@" not in "".join(re.findall(r'(?:fill|stroke): ?[^;"]*', elements))


def test_a_hostile_run_runs_nothing(make_run, plan_of, module, step, sample, tensor, tmp_path):
    hostile = "<img src=x onerror=\"document.body.dataset.owned='yes'\"><b>bold</b>"
    records = [
        step(1),
        step(2, applied=False, skip_reason=hostile),
        sample(2, {(hostile, hostile): ("e4m3", tensor(1.0))}),
    ]
    plan = plan_of([module(hostile, reason=hostile)])
    page = write_report(make_run(records, steps=2, plan=plan))
    elements, complaints = open_page(page, tmp_path / "profile")
    assert complaints == []
    assert 'data-drawn="true"' in elements
    assert "data-owned" not in elements.replace("dataset.owned", "")
    assert "<b>bold" not in elements
