import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.runs import EvalRecord, Metric, RunFolder, TaskInfo


def test_a_new_folder_holds_what_was_asked_and_where_it_runs(create):
    run = create("a/b/run")
    assert sorted(path.name for path in run.path.iterdir()) == [
        "checkpoints",
        "environment.json",
        "recipe.yaml",
        "records.jsonl",
        "resolved.json",
    ]
    assert (run.path / "recipe.yaml").read_bytes() == b"workload: toy\r\n# as given\n"
    assert run.recipe_text == "workload: toy\r\n# as given\n"
    assert run.read_json("resolved.json") == {"steps": {"value": 3, "origin": "default"}}
    assert run.read_json("environment.json") == {"sessions": [{"python": "3.11"}]}
    assert run.records() == []
    assert run.checkpoints.is_dir()


def test_an_empty_folder_is_used(create, tmp_path):
    (tmp_path / "run").mkdir()
    assert create().records() == []


def test_a_folder_that_holds_a_run_is_refused_with_how_to_continue_it(create):
    run = create()
    with pytest.raises(ConfigError, match=r"Choose another --out, or .*`narrowcast resume .*run`"):
        create()
    assert run.recipe_text == "workload: toy\r\n# as given\n"


def test_a_folder_with_other_files_is_refused_and_left_alone(create, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years")
    with pytest.raises(ConfigError, match=r"has files that are not a run .*Choose another --out"):
        create()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_a_file_in_place_of_the_folder_is_refused(create, tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match=r"must be a folder, got a file\. Choose another --out"):
        create()


@pytest.mark.parametrize("target", ["dangling", "file"])
def test_a_path_that_cannot_become_a_folder_is_refused(create, tmp_path, target):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "at" / "all")
    with pytest.raises(ConfigError, match=r"Cannot create a run folder at .*choose another --out"):
        create(f"{target}/run" if target == "file" else target)


def test_of_several_runs_that_start_at_once_in_one_folder_one_is_made_and_stays_whole(tmp_path):
    names = ["a", "b", "c", "d"]
    folders = [tmp_path / f"run{number}" for number in range(100)]
    barrier = Barrier(len(names))

    def begin(name):
        """Begin a run in each folder, at the same moment as the others, and say where it went."""
        made = []
        for folder in folders:
            barrier.wait(timeout=30)
            with contextlib.suppress(ConfigError):
                RunFolder.create(folder, recipe_text=name, resolved={}, environment={"of": name})
                made.append(folder)
        return made

    with ThreadPoolExecutor(len(names)) as pool:
        made = dict(zip(names, pool.map(begin, names), strict=True))
    for folder in folders:
        (owner,) = [name for name in names if folder in made[name]]
        run = RunFolder.open(folder)
        assert run.recipe_text == owner
        assert run.read_json("environment.json") == {"sessions": [{"of": owner}]}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, r"does not exist\. Name the --out folder of a run"),
        (lambda path: path.write_text(""), r"is a file\. Name the --out folder of a run"),
        (lambda path: path.mkdir(), "is not a run folder, because it has no records.jsonl"),
    ],
)
def test_what_is_no_run_folder_is_not_opened(tmp_path, make, message):
    make(tmp_path / "x")
    with pytest.raises(CheckpointError, match=message):
        RunFolder.open(tmp_path / "x")


def test_records_written_before_are_read_after_opening_again(create):
    records = [EvalRecord(step=n, metrics={"loss": 1 / n}) for n in (1, 2, 3)]
    with create() as run:
        for record in records[:2]:
            run.write(record)
    with RunFolder.open(run.path) as again:
        again.write(records[2])
        assert again.records() == records


def test_json_files_are_strict_and_nothing_stays_beside_them(create):
    run = create()
    run.write_json("plan.json", {"seconds": float("inf"), "names": ("a", "b")})
    run.write_json("plan.json", {"seconds": float("nan"), "names": ("a", "b")})
    text = (run.path / "plan.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"seconds": "nan", "names": ["a", "b"]}
    assert [path.name for path in run.path.iterdir() if path.name.startswith(".")] == []


def test_what_cannot_be_json_leaves_the_old_file(create):
    run = create()
    run.write_json("plan.json", {"a": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        run.write_json("plan.json", {"a": object()})
    assert run.read_json("plan.json") == {"a": 1}


@pytest.mark.parametrize(
    "name",
    [
        "../plan.json",
        "/tmp/plan.json",
        "a/plan.json",
        "..\\plan.json",
        "checkpoints/../../plan.json",
        ".json",
        ".plan.json",
        "..",
        "",
        "records.jsonl",
        "recipe.yaml",
        "plan.json\0",
        "plan",
    ],
)
def test_only_json_files_of_the_folder_itself_are_written_or_read(create, name):
    run = create()
    with pytest.raises(CheckpointError, match=r"name of a file in a run folder must be like"):
        run.write_json(name, {})
    with pytest.raises(CheckpointError, match=r"name of a file in a run folder must be like"):
        run.read_json(name)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"a": NaN}', b"[" * 100_000])
def test_a_damaged_json_file_is_refused_by_name(create, content):
    run = create()
    (run.path / "plan.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"plan.json is damaged"):
        run.read_json("plan.json")


def test_a_missing_json_file_is_refused_by_name(create):
    with pytest.raises(CheckpointError, match=r"Cannot read .*plan.json: No such file"):
        create().read_json("plan.json")


def test_every_process_that_continues_a_run_is_noted(create):
    run = create()
    run.add_session({"python": "3.12"})
    assert run.read_json("environment.json") == {
        "sessions": [{"python": "3.11"}, {"python": "3.12"}]
    }


@pytest.mark.parametrize("content", ['{"sessions": "none"}', "[]", "", "{", "\0"])
def test_damaged_notes_on_processes_are_put_aside(create, content):
    run = create()
    (run.path / "environment.json").write_text(content)
    (told,) = run.add_session({"python": "3.12"})
    assert told.endswith("It was renamed to environment.json.damaged")
    assert run.read_json("environment.json") == {"sessions": [{"python": "3.12"}]}
    assert (run.path / "environment.json.damaged").read_text() == content


def test_the_task_is_written_once_and_read_again(create):
    run = create()
    info = TaskInfo(unit="base", metrics=(Metric(name="accuracy", better="higher"),))
    run.set_task_info(info)
    run.set_task_info(info)
    assert RunFolder.open(run.path).task_info() == info


def test_another_task_than_the_run_began_with_is_refused(create):
    run = create()
    run.set_task_info(TaskInfo(unit="base"))
    with pytest.raises(CheckpointError, match=r"counts bases, .*This task counts samples"):
        run.set_task_info(TaskInfo(loss_parts=("a", "b")))
    assert run.task_info() == TaskInfo(unit="base")


def test_a_folder_that_does_not_say_is_of_a_language_model(create):
    info = create().task_info()
    assert (info.unit, info.headline.name) == ("token", "loss")
