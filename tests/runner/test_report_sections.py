import json

import pytest

from narrowcast.report import write_report
from narrowcast.runner.report_sections import write_run_report
from narrowcast.runs import RunFolder


@pytest.fixture
def folder(tmp_path):
    """Make a run folder of a workload of some name."""

    def make(workload):
        resolved = {"workload": {"value": workload, "origin": "a.yaml"}}
        path = tmp_path / "run"
        RunFolder.create(path, recipe_text="", resolved=resolved, environment={}).close()
        return path

    return make


def test_the_sections_are_those_of_the_workload_that_the_folder_names(folder):
    path = folder("tutorial")
    (path / "misread.json").write_text(json.dumps(["MCMXCIV"]))
    page = write_run_report(path).read_text()
    assert "Misread numerals" in page
    assert "MCMXCIV" in page


def test_a_workload_that_is_not_known_here_has_a_plain_report(folder):
    path = folder("waves")
    assert write_run_report(path).read_text() == write_report(path).read_text()
