import json
import re

import pytest

from narrowcast.workloads.sft.judge.report import (
    LONGEST_SHOWN,
    Sample,
    read_samples,
    sections,
    write_samples,
)

SAMPLES = [
    Sample(prompt="What is <b>2 & 2</b>?", before="", after='It\'s "4".', reference="4"),
    Sample(prompt="</div><script>alert(1)</script>", before="x" * 9000, after="é日", reference="."),
]


def test_samples_are_kept_as_they_are(tmp_path):
    write_samples(tmp_path, SAMPLES)
    assert read_samples(tmp_path) == SAMPLES
    assert (
        json.loads((tmp_path / "samples.json").read_text())["samples"][0]["after"] == 'It\'s "4".'
    )


def test_a_run_without_samples_or_measures_has_no_section(tmp_path):
    assert sections(tmp_path) == []
    write_samples(tmp_path, [])
    assert sections(tmp_path) == []


def test_what_a_model_wrote_is_shown_as_text_and_not_as_markup(tmp_path):
    write_samples(tmp_path, SAMPLES)
    (section,) = sections(tmp_path)  # a section with a script in it would be refused
    assert "&lt;b&gt;2 &amp; 2&lt;/b&gt;" in section.html
    assert "<script" not in section.html
    assert "(empty)</span>" in section.html
    assert max(map(len, re.findall("x+", section.html))) == LONGEST_SHOWN
    order = [section.html.index(f">{name}<") for name in ("prompt", "before", "after", "reference")]
    assert order == sorted(order)
    assert not re.search(r"#[0-9a-f]{3,6}\b|rgb\(", section.html)  # colours are the page's


MEASURED = {
    "perplexity": {"nats": 1.5, "perplexity": 4.4817, "tokens": 1023},
    "exact_match": {"right": 3, "rows": 8, "share": 0.375, "low": 0.137, "high": 0.694},
}


def test_measures_stand_side_by_side(tmp_path):
    worse = {**MEASURED, "perplexity": {"nats": "nan", "perplexity": "inf", "tokens": 1023}}
    (tmp_path / "judged.json").write_text(
        json.dumps({"step": 5, "before": MEASURED, "after": worse})
    )
    (section,) = sections(tmp_path)
    text = re.sub("<[^>]*>", " ", section.html)
    assert re.search(r"4\.482\s+1\.5000 nats, 1,023 tokens\s+inf\s+nan nats", text)
    assert re.search(r"37\.5%\s+3 of 8, 95 % interval 13\.7% to 69\.4%", text)


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", '{"samples": 3}', '{"samples": [{}]}', '{"samples": [1]}',
        '{"before": null, "after": {"perplexity": {}}}', '{"before": 1, "after": 2}',
        '{"before": {}, "after": {"exact_match": 1}}', '{"after": {"perplexity": "\\ud800"}}',
        '{"before": null, "after": {"perplexity": {"nats": "x", "perplexity": 1, "tokens": 1}}}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["samples.json", "judged.json"])
def test_a_damaged_file_is_said_to_be(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    (section,) = sections(tmp_path)
    assert f"{name} is damaged" in section.html
