from narrowcast.runs import RunFolder


def test_a_report_made_again_has_the_same_bytes(narrowcast, tiny, tmp_path):
    out = tmp_path / "run"
    narrowcast("train", tiny, "--out", out)
    first = (out / "report.html").read_bytes()
    (out / "report.html").unlink()
    ended = narrowcast("report", out)
    assert (ended.code, ended.out) == (0, f"{out / 'report.html'}\n")
    assert (out / "report.html").read_bytes() == first


def test_a_folder_that_is_not_a_run_is_bad_input(narrowcast, tmp_path):
    ended = narrowcast("report", tmp_path)
    assert ended.code == 2
    assert "Traceback" not in ended.err


def test_a_run_that_has_just_begun_has_a_report(narrowcast, tmp_path):
    RunFolder.create(tmp_path / "run", recipe_text="", resolved={}, environment={})
    assert narrowcast("report", tmp_path / "run").code == 0
