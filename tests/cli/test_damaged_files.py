"""No file of a run folder, whatever it holds, makes a traceback or a wait in any command."""

import copy
import json
import os
import random
import shutil
import signal
import sys

import pytest

from narrowcast.cli.entry import run_command
from narrowcast.report.live.watched import Cursor, WatchedRun

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs pipes and links")

SMALL = ["quickstart", "steps=2", "batch_size=2", "model.layers=1", "model.width=16"]
SMALL += ["model.heads=2", "data.length=16", "health.every=1", "data.eval_windows=4"]
SMALL += ["checkpoint.every=1", "precision.policy=fp16"]
JSON = ("resolved.json", "environment.json", "task.json", "plan.json")
WORDS = ("nothing", [], {}, "", "x", -1, 0, 1.5, 10**30, 10**400, True, "nan", [[]], ["x"])
WORDS += ({"$tensor": "x"}, {"$tuple": 1}, {"$dict": [1]}, {"$float": "q"}, "\ud800", 2**62)
PATIENCE_SECONDS = 60


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train the run to be damaged and one to compare it with."""
    folders = [tmp_path_factory.mktemp("runs") / name for name in ("one", "other")]
    for seed, folder in enumerate(folders):
        words = ["train", *SMALL, f"seed={seed}", "-q", "--out", str(folder)]
        assert run_command(words) == 0
    return folders


@pytest.fixture
def damaged(runs, tmp_path):
    """Copy the run; its weights are missing, so that a resume loads its checkpoint."""
    copied = tmp_path / "run"
    shutil.copytree(runs[0], copied)
    (copied / "model.safetensors").unlink()
    return copied


@pytest.fixture(autouse=True)
def _in_time():
    def give_up(*_):
        pytest.fail("the command waits for something that does not come")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def try_all(folder, other, *, resume=True):
    """Let every command read a folder; return their exit codes."""
    words = [["report", folder], ["compare", folder, other, "--json"]]
    words += [["resume", folder, "-q"]] if resume else []
    codes = {each[0]: run_command([str(word) for word in each]) for each in words}
    _, news = WatchedRun(folder).since(Cursor())
    assert json.dumps(news)
    assert set(codes.values()) <= {0, 2}
    return codes


@pytest.mark.sampled(times=2)
@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize("content", ["[]", "null", "{", '{"a": ' * 5000, "[" * 100_000])
def test_json_of_another_shape_is_refused_by_name(runs, damaged, capsys, name, content):
    (damaged / name).write_text(content)
    codes = try_all(damaged, runs[1], resume=name == "resolved.json")
    assert codes["report"] == codes["compare"] == 2
    assert capsys.readouterr().err.count(f"{name} is damaged") >= 2


@pytest.mark.sampled(times=2)
@pytest.mark.parametrize("name", [*JSON, "recipe.yaml", "records.jsonl", ".lock", "report.html"])
@pytest.mark.parametrize("kind", ["pipe", "endless", "itself", "nowhere", "folder", "vast"])
def test_what_is_no_file_is_not_waited_for(runs, damaged, name, kind):
    file = damaged / name
    file.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "endless":
            file.symlink_to("/dev/zero")
        case "itself":
            file.symlink_to(file.name)
        case "nowhere":
            file.symlink_to("nowhere")
        case "folder":
            file.mkdir()
            (file / "inside").touch()
        case "vast":
            with file.open("wb") as opened:
                opened.truncate(2**43)
    try_all(damaged, runs[1], resume=name in (".lock", "records.jsonl"))


@pytest.mark.parametrize("seed", range(12))
def test_no_value_anywhere_makes_a_traceback(runs, damaged, seed):
    rng = random.Random(seed)
    name = rng.choice([*JSON, "records.jsonl", "records.jsonl"])
    if name == "records.jsonl":
        lines = (damaged / name).read_text().splitlines()
        place = rng.randrange(len(lines))
        lines[place] = json.dumps(changed(json.loads(lines[place]), rng))
        (damaged / name).write_text("\n".join(lines) + "\n")
    else:
        found = json.loads((damaged / name).read_text())
        (damaged / name).write_text(json.dumps(changed(found, rng)))
    try_all(damaged, runs[1])


@pytest.mark.parametrize(
    "spoilt",
    [
        {"sha256": None},
        {"sha256": {"state": 1, "tensors": []}},
        {"sha256": {}},
        {"bytes": "many"},
        {"state": []},
        {"format": "one"},
    ],
)
def test_a_malformed_description_of_a_checkpoint_is_refused(damaged, capsys, spoilt):
    file = damaged / "checkpoints" / "step-000002" / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **spoilt}))
    assert run_command(["resume", str(damaged), "-q"]) == 2
    said = capsys.readouterr().err
    assert str(file.parent) in said
    assert "step-000001, which is intact" in said


def changed(value, rng):
    """Return `value` with something in it set, left out or called another name."""
    value = copy.deepcopy(value)
    places = [place for place in places_in(value) if place]
    place = rng.choice(places if rng.random() < 0.6 else [p for p in places if len(p) < 3])
    inside = value
    for key in place[:-1]:
        inside = inside[key]
    match rng.choice(["set", "set", "left out", "renamed"]):
        case "left out":
            del inside[place[-1]]
        case "renamed" if isinstance(inside, dict):
            inside[f"${place[-1]}"] = inside.pop(place[-1])
        case _:
            inside[place[-1]] = rng.choice(WORDS)
    return value


def places_in(value, at=()):
    yield at
    pairs = value.items() if isinstance(value, dict) else ()
    for key, item in enumerate(value) if isinstance(value, list) else pairs:
        yield from places_in(item, (*at, key))
