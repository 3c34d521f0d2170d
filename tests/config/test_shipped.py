from importlib.resources import files

from narrowcast.config import shipped, shipped_recipes


def test_every_yaml_file_in_the_package_is_a_shipped_recipe():
    folder = files("narrowcast.config").joinpath("recipes")
    count = sum(path.suffix == ".yaml" for path in folder.rglob("*"))
    assert len(shipped_recipes()) == count


def test_recipes_have_name_and_description_and_those_without_a_folder_come_first(
    tmp_path, monkeypatch
):
    for name in ("zebra", "lm/b-1.3b", "lm/a", "other"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(f"workload: toy\ndescription: about {name}\n")
    (tmp_path / "notes.txt").write_text("not a recipe")
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    names = ["other", "zebra", "lm/a", "lm/b-1.3b"]
    assert shipped_recipes() == [(name, f"about {name}") for name in names]
