import subprocess
import sys

import pytest

from narrowcast.errors import RecipeError
from narrowcast.workloads import WORKLOADS, load_recipe, sections_of


@pytest.mark.parametrize("workload", WORKLOADS)
def test_settings_are_read_without_torch(workload):
    code = (
        "import sys; from narrowcast.workloads import sections_of; "
        f"sections_of({workload!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_setting_of_a_workload_is_described(workload):
    sections = sections_of(workload)
    fields = {**sections.data.model_fields, **sections.model.model_fields}
    assert not [name for name, field in fields.items() if not field.description]


def test_an_unknown_workload_is_refused_with_those_there_are():
    with pytest.raises(RecipeError, match="no such workload as 'knitting'; there are: lm"):
        sections_of("knitting")


def test_a_misspelt_workload_is_refused_with_a_suggestion():
    with pytest.raises(RecipeError, match=r"workload=lmm: .*did you mean lm\?"):
        load_recipe("quickstart", ["workload=lmm"])
