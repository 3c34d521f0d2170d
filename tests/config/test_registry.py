from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from narrowcast.config.registry import Registry
from narrowcast.config.workload import Command, Workload
from narrowcast.errors import ConfigError


def made(name, **settings):
    return Workload(name=name, about=name, sections="json:dumps", task="json:loads", **settings)


KNITS = Command("knits", "json:dumps")


@dataclass(frozen=True)
class Entry:
    name: str
    value: str
    package: str = "a-package"

    @property
    def dist(self):
        return SimpleNamespace(name=self.package)


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """Make a registry of one built-in workload and the entries given, from a module `shelf`."""
    (tmp_path / "shelf").mkdir()
    for name in ("own", "own/large", "small"):
        (tmp_path / "shelf" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "shelf" / f"{name}.yaml").write_text("workload: own\n")
    shelf = SimpleNamespace(
        BASE=made("base", recipes=tmp_path / "shelf"),
        OWN=made("own", recipes=tmp_path / "shelf"),
        NONE=3,
        KNIT=made("knit", commands=(KNITS,)),
        ALSO=made("also", commands=(KNITS,)),
    )
    monkeypatch.setitem(__import__("sys").modules, "shelf", shelf)
    return lambda *entries: Registry({"base": "shelf:BASE"}, installed=lambda: entries)


def test_an_installed_workload_stands_beside_the_built_in_ones(registry):
    found = registry(Entry("own", "shelf:OWN"))
    assert found.names == ["base", "own"]
    assert [each.name for each in found.workloads()] == ["base", "own"]
    assert found.workload("own").distribution == "a-package"
    assert found.problems() == []


def test_nothing_installed_is_looked_for_where_a_built_in_one_is_asked_for():
    def refuse():
        raise AssertionError

    found = Registry({"lm": "narrowcast.workloads.lm:WORKLOAD"}, installed=refuse)
    assert found.workload("lm").name == "lm"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("no_such_module:X", "'own' of a-package cannot be imported from no_such_module:X: Module"),
        ("shelf:MISSING", "cannot be imported from shelf:MISSING: AttributeError"),
        ("shelf:NONE", r"registers shelf:NONE as the workload 'own', but it is none"),
        ("shelf:BASE", r"it is a workload called 'base'"),
    ],
)
def test_a_broken_one_is_refused_to_whoever_asks_and_breaks_nobody_else(registry, value, said):
    found = registry(Entry("own", value))
    with pytest.raises(ConfigError, match=said):
        found.workload("own")
    assert [each.name for each in found.workloads()] == ["base"]
    assert set(found.recipe_files()) == {"own", "own/large", "small"}
    (problem,) = found.problems()
    assert "own" in problem


def test_of_two_with_one_name_neither_is_taken(registry):
    found = registry(Entry("own", "shelf:OWN", "one"), Entry("own", "shelf:OWN", "two"))
    with pytest.raises(ConfigError, match=r"'own', one and two. Uninstall one of them"):
        found.workload("own")


def test_a_built_in_one_is_not_replaced_and_the_clash_is_told(registry):
    found = registry(Entry("base", "shelf:OWN"))
    assert found.workload("base").name == "base"
    assert found.names == ["base"]
    (problem,) = found.problems()
    assert problem.startswith("a-package registers a workload 'base', which narrowcast has too")


def test_a_recipe_of_an_installed_workload_bears_its_name(registry):
    shelf = __import__("sys").modules["shelf"]
    shelf.BASE = made("base")
    found = registry(Entry("own", "shelf:OWN"))
    assert list(found.recipe_files()) == ["own", "own/large", "own/small"]


def test_an_unknown_name_is_refused_with_one_like_it(registry):
    with pytest.raises(ConfigError, match=r"there is no workload 'bass'. Did you mean base\?"):
        registry().workload("bass")


def test_a_command_that_two_installed_workloads_bring_is_nobodys(registry):
    found = registry(Entry("knit", "shelf:KNIT", "one"), Entry("also", "shelf:ALSO", "two"))
    assert found.commands() == {}
    (problem,) = found.problems()
    assert problem == found.clash("knits")
    assert problem.startswith("two workloads have a command 'knits', knit of one and also of two")


def test_a_command_of_the_package_is_not_replaced_and_the_clash_is_told(registry):
    shelf = __import__("sys").modules["shelf"]
    shelf.BASE = made("base", commands=(KNITS,))
    found = registry(Entry("knit", "shelf:KNIT", "one"))
    assert {name: owner.name for name, owner in found.commands().items()} == {"knits": "base"}
    assert found.clash("knits") == ""
    (problem,) = found.problems()
    assert problem.startswith("one: its command 'knits' is left out because workload base")
