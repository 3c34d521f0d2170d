import subprocess
import sys

import pytest

from narrowcast.config.workload import Command, Workload, require_modules
from narrowcast.errors import ConfigError, UnsupportedError


def workload(**settings):
    usual = {"name": "toy", "about": "a toy", "sections": "json:dumps", "task": "json:loads"}
    return Workload(**{**usual, **settings})


@pytest.mark.parametrize("name", ["train", "schema", "verify-resume"])
def test_a_workload_cannot_be_called_as_a_verb_is(name):
    with pytest.raises(ConfigError, match=f"because `narrowcast {name}` exists"):
        workload(name=name)


@pytest.mark.parametrize("name", ["", "My Toy", "lm/toy", "-x"])
def test_a_name_is_one_that_can_be_typed(name):
    with pytest.raises(ConfigError, match="Write small letters"):
        workload(name=name)


@pytest.mark.parametrize("field", ["sections", "task", "report"])
def test_a_part_is_named_by_module_and_attribute(field):
    with pytest.raises(ConfigError, match=f"{field} of workload toy must be module:attribute"):
        workload(**{field: "json"})


def command(name="knit", place="json:dumps"):
    return Command(name, place)


@pytest.mark.parametrize(
    ("commands", "said"),
    [
        (
            [command("train")],
            "a command of workload toy cannot be called train, because `narr",
        ),
        ([command("My Toy")], "a command of workload toy cannot be called 'My Toy'. Write small"),
        ([command(), command()], "workload toy has two commands called knit. Keep one"),
        ([command(place="json")], "command knit of workload toy must be module:attribute"),
    ],
)
def test_a_command_has_a_free_name_and_a_place(commands, said):
    with pytest.raises(ConfigError, match=said):
        workload(commands=tuple(commands))


def test_a_command_needs_not_be_called_as_its_workload_is():
    import json

    toy = workload(commands=(command("knit"), command("purl", place="json:loads")))
    assert toy.load_command("purl") is json.loads


def test_a_part_is_imported_when_it_is_asked_for():
    code = (
        "import sys; from narrowcast.config.workload import Workload;"
        "w = Workload(name='toy', about='', sections='wave:open', task='wave:open');"
        "assert 'wave' not in sys.modules; w.load('task'); assert 'wave' in sys.modules;"
        "sys.exit('pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_is_not_installed_is_an_error_that_names_the_extra():
    toy = workload(requires=("no_such_module", "json"), extra="toys", distribution="toy-shop")
    with pytest.raises(
        UnsupportedError,
        match=r"workload toy needs no_such_module. Run pip install 'toy-shop\[toys\]'",
    ):
        toy.load("task")


def test_settings_can_be_read_without_what_only_training_needs():
    import json

    assert workload(requires=("no_such_module",)).load("sections") is json.dumps


def test_without_an_extra_the_modules_themselves_are_named():
    with pytest.raises(UnsupportedError, match=r"pip install no_such_module$"):
        require_modules(["no_such_module"], of="it", install="")
