import json
import re
from importlib.resources import files

from narrowcast.report.live.page import documents

STYLE = files("narrowcast.report").joinpath("templates", "live.css").read_text(encoding="utf-8")


def test_the_live_page_has_no_colours_of_its_own():
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b|rgba?\(|hsla?\(", re.sub(r"#[a-z-]+ ", "", STYLE)) == []


def test_every_chart_of_the_page_has_its_place():
    page = documents()["/"].body.decode()
    text = re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1]
    charts = re.findall(r'<div class="chart" id="(\w+)"', page)
    assert charts == list(json.loads(text))
    assert len(set(re.findall(r' id="([^"]+)"', page))) == len(re.findall(r' id="([^"]+)"', page))
