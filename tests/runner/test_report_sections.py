import pytest

from narrowcast.report import write_report
from narrowcast.runner import report_sections
from narrowcast.runner.report_sections import write_run_report
from narrowcast.runs import ReportSection, RunFolder


@pytest.fixture
def folder(tmp_path):
    resolved = {"workload": {"value": "waves", "origin": "waves.yaml"}}
    path = tmp_path / "run"
    RunFolder.create(path, recipe_text="", resolved=resolved, environment={}).close()
    return path


def test_the_sections_are_those_of_the_workload_that_the_folder_names(folder, monkeypatch):
    drawn = ReportSection(title="Spectra", html="<p>flat</p>")
    monkeypatch.setitem(report_sections.SECTIONS, "waves", lambda folder, records: [drawn])
    assert "Spectra" in write_run_report(folder).read_text()


def test_a_workload_that_is_not_known_here_has_a_plain_report(folder):
    assert write_run_report(folder).read_text() == write_report(folder).read_text()
