"""What a decomposition leaves for its report comes back as it was, or is refused."""

import json
import math

import pytest
from pydantic import ValidationError

from narrowcast.workloads.decompose.report import schema


def test_what_was_written_is_read_again(toy, language, tmp_path):
    for name, found in (("toy", toy), ("language", language)):
        folder = tmp_path / name
        folder.mkdir()
        schema.write(folder, found)
        assert schema.read(folder) == found


def test_a_number_that_is_not_finite_stays_one(toy, tmp_path):
    site = toy.sites[0].model_copy(update={"l0": (math.inf, None, 0.2)})
    schema.write(tmp_path, toy.model_copy(update={"sites": (site,)}))
    assert schema.read(tmp_path).sites[0].l0 == (math.inf, None, 0.2)


def test_four_thousand_components_at_24_sites_take_less_than_a_megabyte(language, tmp_path):
    schema.write(tmp_path, language)
    assert (tmp_path / schema.FILE).stat().st_size < 2**20


@pytest.mark.parametrize(
    "changes",
    [{"seeds": []}, {"sites": 3}, {"sights": []}, {"alive_threshold": None}, {"seeds": [0, 1]}],
)
def test_a_file_of_another_shape_is_refused(changes, toy, tmp_path):
    told = json.loads(toy.model_dump_json()) | changes
    (tmp_path / schema.FILE).write_text(json.dumps(told))
    with pytest.raises(ValidationError, match=next(iter(changes))):
        schema.read(tmp_path)
