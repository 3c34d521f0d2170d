import base64
import json
import zlib
from importlib.resources import files

import pytest

from narrowcast.report.charts.run_charts import Chart
from narrowcast.report.rendering import asset, chart_data, packed_plotly, security_policy


def test_the_packed_script_unpacks_to_the_plotly_that_is_installed():
    packed, _ = packed_plotly()
    installed = files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
    assert zlib.decompress(base64.b64decode(packed)) == installed


def test_the_policy_lets_a_page_load_nothing_and_run_two_scripts():
    rules = dict(rule.split(" ", 1) for rule in security_policy().split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    assert "connect-src" not in rules
    assert [source[:8] for source in rules["script-src"].split()] == ["'sha256-", "'sha256-"]


@pytest.mark.parametrize("hostile", ["</script>", "<!--<script>", "]]>", "&lt;", "\u2028"])
def test_a_text_of_the_run_cannot_end_the_data_it_stands_in(hostile):
    chart = Chart(name="loss", title="", alt="", data=[{"text": [hostile]}], layout={})
    written = chart_data([chart])
    assert not set("<>&\u2028") & set(written)
    assert json.loads(written)["loss"]["data"][0]["text"] == [hostile]


def test_our_own_script_cannot_end_its_element():
    assert "</script" not in asset("page.js").lower()
    assert "<!--" not in asset("page.js")
