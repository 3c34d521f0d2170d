import base64
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from narrowcast.errors import CheckpointError
from narrowcast.report import write_report
from narrowcast.runs import (
    CheckpointRecord,
    EvalRecord,
    ExponentRecord,
    FindingRecord,
    PrecisionRecord,
    ReportSection,
    RunFolder,
)

VOID = {"meta", "link", "br", "input", "img", "hr", "wbr"}
LOADING = ("src", "href", "srcset", "action", "formaction", "data", "poster", "background", "cite")


class Page(HTMLParser):
    """A page as a browser would see it: its elements, its texts, and what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.unbalanced: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        self.unbalanced += self._open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        if self._open and self._open[-1] == tag:
            self._open.pop()
        else:
            self.unbalanced.append(tag)

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
        elif not self._open or self._open[-1] != "style":
            self.text += data

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def page_of(path):
    return Page(write_report(path).read_text(encoding="utf-8"))


def test_the_same_folder_gives_the_same_bytes(run_folder, tmp_path):
    first = write_report(run_folder).read_bytes()
    assert write_report(run_folder).read_bytes() == first
    elsewhere = tmp_path / "some where" / "else"
    shutil.copytree(run_folder, elsewhere)
    os.utime(elsewhere / "records.jsonl", (0, 0))
    assert write_report(elsewhere).read_bytes() == first


def test_another_process_on_another_day_gives_the_same_bytes(run_folder):
    first = write_report(run_folder).read_bytes()
    code = (
        "import sys, time; time.time = lambda: 4e9;"
        "from narrowcast.report import write_report; write_report(sys.argv[1]);"
        "assert 'torch' not in sys.modules"
    )
    surroundings = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    subprocess.run([sys.executable, "-c", code, run_folder], check=True, env=surroundings)
    assert (run_folder / "report.html").read_bytes() == first


def test_the_page_names_no_outside_address(run_folder):
    text = write_report(run_folder).read_text(encoding="utf-8")
    assert "://" not in text
    assert not re.search(r"url\(|@import", text)
    named = [
        attributes[name]
        for _, attributes in Page(text).elements
        for name in LOADING
        if name in attributes
    ]
    assert set(named) <= {"data:,"}


def test_the_page_forbids_every_load_and_every_script_but_its_own(run_folder):
    page = page_of(run_folder)
    (policy,) = [
        m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'; ")
    running = [
        text
        for text, attributes in zip(page.scripts, page.all("script"), strict=True)
        if "type" not in attributes
    ]
    assert len(running) == 1
    digest = base64.b64encode(hashlib.sha256(running[0].encode()).digest()).decode()
    assert f"'sha256-{digest}'" in policy


def test_the_page_is_well_formed_and_its_ids_are_unique(run_folder):
    page = page_of(run_folder)
    assert page.unbalanced == []
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    pointed = [
        target
        for _, attributes in page.elements
        for name in ("for", "aria-labelledby")
        for target in (attributes.get(name) or "").split()
    ]
    assert set(pointed) <= set(ids)


def test_a_page_can_be_followed_without_seeing_it(run_folder):
    page = page_of(run_folder)
    assert page.all("html") == [{"lang": "en"}]
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    charts = [a for _, a in page.elements if a.get("class") == "chart"]
    assert len(charts) == 6
    assert all(chart["role"] == "img" and chart["aria-label"] for chart in charts)
    assert all(attributes.get("scope") for attributes in page.all("th"))


def test_the_page_tells_what_became_of_the_tensors(healthy_folder):
    page = page_of(healthy_folder)
    assert page.unbalanced == []
    for said in (
        "Saturation in blocks.1.mlp.down (input) since step 150: amax 2,900 is beyond 448",
        "Keep it with precision.overrides.",
        "blocks.1.mlp.down went from fp16 to bf16 at step 200, and stayed so: saturated.",
        "4 modules, 8 tensors, sampled at 30 steps; the worst is the input of blocks.1.mlp.down",
        "blocks.1.mlp.down · input",
        "above the format",
        "since 200",
        "unchanged",
    ):
        assert said in page.text
    charts = [a["id"] for _, a in page.elements if a.get("class") == "chart"]
    assert charts[-3:] == ["heat", "spread0", "spread1"]
    labelled = {a.get("for") for a in page.all("label")}
    assert {"heat-role", "heat-order"} <= labelled
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_a_run_without_statistics_says_so(run_folder):
    text = page_of(run_folder).text
    assert "No tensor statistics were recorded." in text
    assert "No format changed during the run" in text


def test_the_page_tells_the_run(run_folder):
    text = page_of(run_folder).text
    for said in (
        "quickstart trained in fp16 (emulated) for 300 steps: evaluated loss fell from",
        "A small language model on English text",
        "Finished",
        "blocks.{0–3}.mlp.down",
        "this CPU has no fp16 products",
        "kept fp32: normalisation",
        "the scale began too high",
        "2 of 65,536 gradients overflowed fp16",
        "Optimizer moments",
        "enough to see it learn",
        "Example CPU",
        "precision.loss_scale.max_skipped_steps",
    ):
        assert said in text


def test_what_the_run_wrote_cannot_become_part_of_the_page(
    make_run, plan_of, module, step, sample, tensor
):
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&amp;"
    plain = page_of(make_run([step(1)], folder="plain", steps=2, plan=plan_of([module("x")])))
    path = make_run(
        [
            step(1),
            step(2, applied=False, skip_reason=hostile),
            EvalRecord(step=2, metrics={hostile: 1.0}),
            FindingRecord(
                step=2,
                since=2,
                module=hostile,
                role=hostile,
                what=hostile,
                why=hostile,
                action=hostile,
                advice=hostile,
            ),
            PrecisionRecord(step=2, module=hostile, before=hostile, after=hostile, reason=hostile),
            replace(sample(2, {(hostile, hostile): ("e4m3", tensor(1.0))}), format=(hostile,)),
            ExponentRecord(
                step=2, module=hostile, role=hostile, format=hostile, lowest=0, counts=(1,)
            ),
        ],
        folder="hostile",
        steps=2,
        plan=plan_of([module(hostile, kind=hostile, forward=hostile, how=hostile, reason=hostile)]),
        **{"name": hostile, "description": hostile, "precision.policy": hostile},
    )
    (path / "recipe.yaml").write_text(hostile)
    environment = {"sessions": [{"cpu": hostile, hostile: hostile}]}
    (path / "environment.json").write_text(json.dumps(environment))
    page = page_of(path)
    assert page.unbalanced == []
    assert page.all("img") == []
    assert len(page.scripts) == len(plain.scripts) == 4
    assert page.text.count(hostile) >= 25
    assert page.scripts[-1] == plain.scripts[-1]
    assert not any("onerror" in name for _, found in page.elements for name in found)


def nothing(step):
    return []


def one_step(step):
    return [step(1)]


def never_finite(step):
    return [
        step(n, loss=math.nan, grad_norm=math.nan, applied=False, skip_reason="nan") for n in (1, 2)
    ]


def interrupted(step):
    saved = CheckpointRecord(step=2, seconds_blocked=0.1, seconds_total=0.1, bytes=1)
    return [step(1), step(2), saved]


def diverged(step):
    return [step(1)] + [
        step(n, loss=math.inf, grad_norm=math.inf, applied=False, skip_reason="inf", loss_scale=1.0)
        for n in range(2, 60)
    ]


def unscaled(step):
    return [step(n, loss_scale=1.0) for n in range(1, 4)]


def never_scaled_to_zero(step):
    return [step(1, loss_scale=0.0, seconds=0.0, items=0, lr=0.0, grad_norm=0.0, loss=0.0)]


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (nothing, ["No step yet", "has not run a step", "No step has been recorded"]),
        (one_step, ["Unfinished", "1 of 100 steps", "never evaluated", "has no evaluation"]),
        (never_finite, ["Loss not finite", "training loss never finite", "2 skipped (100 %)"]),
        (interrupted, ["Stopped", "2 of 100 steps", "narrowcast resume"]),
        (diverged, ["Diverged", "The last 58 steps were all skipped", "not finite in 58 steps"]),
        (unscaled, ["The loss scale was 1 throughout", "No step was skipped", "No findings"]),
        (never_scaled_to_zero, ["Unfinished"]),
    ],
)
@pytest.mark.parametrize("planned", [True, False])
def test_a_run_in_any_state_has_a_page_that_says_so(
    records, said, planned, make_run, plan_of, gpt_modules, step
):
    plan = plan_of(gpt_modules(1)) if planned else None
    page = page_of(make_run(records(step), steps=100, plan=plan))
    assert page.unbalanced == []
    assert [text for text in said if text not in page.text] == []
    assert ("The folder has no plan." in page.text) is not planned


def test_a_resumed_run_shows_where_its_sessions_differ(run_folder):
    with RunFolder.open(run_folder) as run:
        first = run.read_json("environment.json")["sessions"][0]
        run.add_session({**first, "torch": "2.14.0"})
    text = page_of(run_folder).text
    assert "resumed 1 time" in text
    assert "2.13.02.14.0" in text
    assert text.count("Example CPU") == 1


def test_a_long_run_gives_a_small_page_soon(make_run, course, plan_of, module, sample, tensor):
    names = [f"part{i}.proj" for i in range(100)]
    roles = ("input", "weight", "output", "grad_output", "grad_weight", "update")
    sites = {(name, role): 4.0 ** (i % 8) for i, name in enumerate(names) for role in roles}
    few = [
        sample(0, {site: ("e4m3", tensor(x, seed=k)) for site, x in sites.items()})
        for k in range(3)
    ]
    health = [replace(few[n % 3], step=10 * n) for n in range(1, 1001)]
    records = [*course(10_000, eval_every=500), *health]
    path = make_run(records, steps=10_000, plan=plan_of([module(name) for name in names]))
    began = time.process_time()
    page = write_report(path)
    assert time.process_time() - began < 5
    assert page.stat().st_size < 6_000_000


def test_a_long_run_that_skips_every_other_step_gives_a_small_page(make_run, step):
    records = [
        step(
            n,
            applied=n % 2 == 0,
            skip_reason="" if n % 2 == 0 else f"step {n}: " + "overflow " * 15,
        )
        for n in range(10_000)
    ]
    page = write_report(make_run(records, steps=10_000))
    assert page.stat().st_size < 6_000_000


def test_a_page_that_cannot_be_written_is_an_error_of_ours(run_folder):
    (run_folder / "report.html").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot write .*report\.html"):
        write_report(run_folder)


def test_a_page_is_about_what_the_task_counts_and_is_judged_by(
    make_run, classifier, classifier_course
):
    folder = make_run(classifier_course, steps=300, task=classifier)
    page = write_report(folder).read_text()
    assert "Series per second" in page
    assert "okens" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "Loss parts over 300 steps: reconstruction" in page
    assert "Evaluated accuracy" in page
    assert "Higher is better for accuracy; lower is better for loss." in page


def test_a_page_of_a_loss_of_one_piece_does_not_speak_of_parts(run_folder):
    page = write_report(run_folder).read_text()
    assert "Loss parts" not in page
    assert "Higher is better" not in page


def test_the_sections_of_a_workload_stand_under_their_headings_and_the_same_folder_gives_the_same(
    run_folder,
):
    def sections(folder, records):
        judged = [r for r in records if isinstance(r, EvalRecord)]
        text = f"<p class='motifs'>{len(judged)} evaluations</p>"
        return [ReportSection(title="Motifs & more", html=text)]

    page = write_report(run_folder, sections=sections).read_text()
    assert "<h2 id=\"own-1\">Motifs &amp; more</h2>\n  <p class='motifs'>3 evaluations</p>" in page
    assert write_report(run_folder, sections=sections).read_text() == page
    assert "own-1" not in write_report(run_folder).read_text()
