import subprocess
import sys

import pytest

from narrowcast.errors import ConfigError
from narrowcast.workloads import (
    BUILT_IN,
    load_recipe,
    recipe_files,
    report_sections,
    shipped_recipes,
    workload_sections,
)


@pytest.mark.parametrize("workload", BUILT_IN)
def test_settings_are_read_without_torch(workload):
    code = (
        "import sys; from narrowcast.workloads import workload_sections; "
        f"workload_sections({workload!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("workload", BUILT_IN)
def test_every_setting_of_a_workload_is_described(workload):
    sections = workload_sections(workload)
    fields = [field for kind in sections.by_name.values() for field in kind.model_fields.items()]
    assert not [name for name, field in fields if not field.description]


def test_an_unknown_workload_is_refused_with_those_there_are():
    known = r"workload .knitting.. Write one of decompose, forecast, genomics, lm, sft, tutorial"
    with pytest.raises(ConfigError, match=known):
        workload_sections("knitting")


def test_a_misspelt_workload_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"workload=lmm: .*Did you mean lm\?"):
        load_recipe("quickstart", ["workload=lmm"])


def test_every_shipped_recipe_is_of_the_workload_in_whose_folder_it_lies():
    for name, path in recipe_files().items():
        words = ["data.path=sums"] if name.startswith("sft/") else []
        assert (
            load_recipe(name, words).recipe.workload == path.parts[path.parts.index("recipes") - 1]
        )


def test_recipes_without_a_folder_come_first_and_all_have_a_description():
    listed = shipped_recipes()
    depths = [name.count("/") for name, _ in listed]
    assert depths == sorted(depths)
    assert all(description for _, description in listed)


def test_a_section_of_a_report_that_fails_is_told_and_the_page_is_made(tmp_path):
    (tmp_path / "misread.json").write_text("{<b>")
    resolved = {"workload": {"value": "tutorial", "origin": "tutorial.yaml"}}
    (section,) = report_sections(resolved, tmp_path, [])
    assert section.title == "tutorial: report section failed"
    assert "JSONDecodeError" in section.html
