from pathlib import Path

import pytest

from narrowcast.cli.entry import exit_code_of
from narrowcast.errors import RecipeError
from narrowcast.runner.out_dir import out_dir_for
from narrowcast.runs import RunFolder


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_first_run_of_a_name_gets_it():
    assert out_dir_for("lm/gpt-124m", None).path == Path("runs/lm-gpt-124m")


def test_a_name_that_is_taken_is_numbered_and_said():
    Path("runs/quickstart").mkdir(parents=True)
    Path("runs/quickstart-2").mkdir()
    place = out_dir_for("quickstart", None)
    assert place.path == Path("runs/quickstart-3")
    assert str(place) == "runs/quickstart-3 (runs/quickstart is taken)"


@pytest.mark.parametrize("name", ["..", "/", "a/../../b", "", "my run"])
def test_no_name_leads_out_of_the_folder_of_runs(name):
    path = out_dir_for(name, None).path
    assert path.resolve().parent == Path("runs").resolve()


def test_a_chosen_folder_that_holds_a_run_is_refused():
    RunFolder.create("mine", recipe_text="", resolved={}, environment={})
    with pytest.raises(RecipeError, match="mine already holds a run; choose another --out"):
        out_dir_for("quickstart", "mine")


def test_a_chosen_folder_that_is_not_there_is_taken():
    assert out_dir_for("quickstart", "mine").path == Path("mine")


def test_a_folder_that_is_claimed_stays_with_its_run_and_goes_without_one():
    place = out_dir_for("a", None)
    with place.claimed():
        assert out_dir_for("a", None).path == Path("runs/a-2")
    assert not place.path.exists()
    with place.claimed():
        (place.path / "resolved.json").touch()
    assert place.path.exists()


def test_what_is_in_the_way_of_a_run_that_nobody_named_is_said(tiny, capsys):
    Path("runs").write_text("no folder")
    assert exit_code_of(["train", tiny]) == 2
    assert "cannot make a run folder at runs/tiny" in capsys.readouterr().err
