import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import narrowcast as nc
from narrowcast.cli.entry import run_command
from narrowcast.errors import ConfigError
from narrowcast.runner.out_dir import out_dir
from narrowcast.runs import RunFolder


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_first_run_of_a_name_gets_it():
    with out_dir("lm/gpt-124m", None) as place:
        assert place.path == Path("runs/lm-gpt-124m")


def test_a_name_that_is_taken_is_numbered_and_said():
    Path("runs/quickstart").mkdir(parents=True)
    Path("runs/quickstart-2").mkdir()
    with out_dir("quickstart", None) as place:
        assert place.path == Path("runs/quickstart-3")
        assert str(place) == "runs/quickstart-3 (runs/quickstart is taken)"


@pytest.mark.parametrize("name", ["..", "/", "a/../../b", "", "my run"])
def test_no_name_leads_out_of_the_folder_of_runs(name):
    with out_dir(name, None) as place:
        assert place.path.resolve().parent == Path("runs").resolve()


def test_a_chosen_folder_that_holds_a_run_is_refused():
    RunFolder.create("mine", recipe_text="", resolved={}, environment={})
    place = out_dir("quickstart", "mine")
    with pytest.raises(ConfigError, match=r"mine already has a run\. Choose another --out"):
        place.__enter__()


def test_a_chosen_folder_that_is_not_there_is_taken():
    with out_dir("quickstart", "mine") as place:
        assert place.path == Path("mine")


def test_runs_that_start_at_once_have_a_folder_each():
    start = threading.Barrier(8)

    def claim(_):
        start.wait()
        with out_dir("a", None) as place:
            (place.path / "recipe.yaml").open("x").close()
            return place.path.name

    with ThreadPoolExecutor(8) as threads:
        names = list(threads.map(claim, range(8)))
    assert sorted(names) == sorted(["a", *(f"a-{number}" for number in range(2, 10))][:8])


def test_a_folder_that_nobody_named_stays_with_its_run_and_goes_without_one():
    with out_dir("a", None) as place:
        assert place.path.is_dir()
    assert not place.path.exists()
    with out_dir("a", None) as place:
        (place.path / "resolved.json").touch()
    assert place.path.exists()


def test_a_refused_run_leaves_no_folder_of_runs_that_was_not_there(tiny):
    assert run_command(["train", tiny, "data.text=nowhere"]) == 2
    assert not Path("runs").exists()
    Path("runs").mkdir()
    assert run_command(["train", tiny, "data.text=nowhere"]) == 2
    with out_dir("a", None) as place, out_dir("b", None):
        pass
    assert not place.path.exists()
    assert Path("runs").is_dir()


def test_a_folder_of_runs_that_another_run_is_in_stays():
    with out_dir("a", None), out_dir("b", None) as place:
        (place.path / "resolved.json").touch()
    assert [path.name for path in Path("runs").iterdir()] == ["b"]


def test_what_is_in_the_way_of_a_run_that_nobody_named_is_said(tiny, capsys):
    Path("runs").write_text("no folder")
    assert run_command(["train", tiny]) == 2
    assert "Cannot create a run folder at runs/tiny" in capsys.readouterr().err


def test_a_link_to_nowhere_in_the_place_of_all_runs_is_said(tiny, capsys):
    Path("runs").symlink_to("nowhere")
    assert run_command(["train", tiny]) == 2
    assert "Cannot create a run folder at runs/tiny" in capsys.readouterr().err


def test_a_world_of_one_process_trains(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert nc.train("tutorial", ["steps=1"]).finish().step == 1
