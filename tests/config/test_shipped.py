from narrowcast.config.registry import read_description, recipes_in


def test_a_recipe_is_called_after_its_place_in_the_folder(tmp_path):
    for name in ("zebra", "lm/b-1.3b", "lm/a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(f"workload: toy\ndescription: about {name}\n")
    (tmp_path / "notes.txt").write_text("not a recipe")
    found = recipes_in(tmp_path)
    assert set(found) == {"zebra", "lm/a", "lm/b-1.3b"}
    assert {name: read_description(path) for name, path in found.items()} == {
        name: f"about {name}" for name in found
    }


def test_a_workload_without_recipes_has_none():
    assert recipes_in(None) == {}
